"""The arithmetic of a rotation, so written that every program gives the same bits."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

# The least rotary_dim that needs no care. Source: the programs that
# tests/test_train_serve.py compares, on x86-64 under JAX 0.10 and 0.12: of float16
# heads some differed up to 16 features, of others up to 8.
WIDE, WIDE_FLOAT16 = 16, 32


def rounds_products(rotary_dim: int, dtype: np.dtype) -> bool:
    """Whether a rotation of heads of this width and type rounds every product.

    The code generators of XLA contract the product with the cosine into a fused
    multiply-and-add, in every program alike where a loop runs over the features. The
    loop over few features is unrolled, and then one product, the other or none is
    contracted, as each program falls out.
    """
    return rotary_dim < (WIDE_FLOAT16 if dtype == np.float16 else WIDE)


def complex_product(
    first: Float[Array, "..."],
    second: Float[Array, "..."],
    cos: Float[Array, "..."],
    sin: Float[Array, "..."],
    *,
    rounded: bool,
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """`first cos - second sin` and `second cos + first sin`.

    A rounded product is multiplied by a one that the compiler cannot see: that can be
    contracted too, and is still the sum of two rounded products, IEEE arithmetic. A
    barrier would do it at the price of storing the products.

    Args:
      first: of each pair.
      second: likewise.
      cos: that broadcasts to it.
      sin: likewise.
      rounded: whether every product is rounded, from `rounds_products`.
    """
    products = (first * cos, second * sin, second * cos, first * sin)
    if rounded:
        one = _opaque_one(cos)
        products = tuple(product * one for product in products)
    first_cos, second_sin, second_cos, first_sin = products
    return first_cos - second_sin, second_cos + first_sin


def squared_size(cos: Float[Array, "... half"], sin: Array) -> Float[Array, "... half"]:
    """`cos cos + sin sin` of a rotation's rows."""
    rounded = rounds_products(2 * cos.shape[-1], cos.dtype)
    return complex_product(cos, -sin, cos, sin, rounded=rounded)[0]


def _opaque_one(rows: Float[Array, "..."]) -> Float[Array, "..."]:
    """1 for every finite element and NaN for NaN, which no compiler may fold.

    It does fold where rows are constants of the program.
    """
    zero, one = (jnp.full((), value, rows.dtype) for value in (0, 1))
    return lax.stop_gradient(rows * zero + one)
