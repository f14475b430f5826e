"""The structures of XLA's FFI, as far as a handler reads them.

Source: `xla/ffi/api/c_api.h`, which comes with jaxlib (`jax.ffi.include_dir()`).
"""

# Versions of the interface, (major, minor), whose header was read: 0.3 is that of JAX
# 0.10, 0.4 of 0.11, 0.5 of 0.12. What is used of it is the same in each.
MAJOR, FIRST_MINOR, LAST_MINOR = 0, 3, 5

# Sizes of its structures in bytes, each to the end of its last field.
FRAME_SIZE, ARGS_SIZE, RETS_SIZE, ATTRS_SIZE = 168, 40, 40, 48
BUFFER_SIZE, ERROR_ARGS_SIZE = 48, 28
EXTENSION_SIZE, METADATA_SIZE = 32, 36
# To the end of XLA_FFI_Error_Create; later versions add functions after it.
LEAST_API_SIZE = 56

# Where fields are, in words of 8 bytes. Every structure starts with its size and then
# the address of an extension; enumerations take the lower half of their word.
EXTENSION = 1
FRAME_API, FRAME_STAGE, FRAME_ARGS, FRAME_RETS, FRAME_ATTRS = 2, 4, 5, 10, 15
FRAME_WORDS = 21
SIZE, TYPES, ARGS = 2, 3, 4  # of args and rets, from their own start
NAMES, ATTRS = 4, 5  # of attrs, likewise
API_VERSION, API_ERROR_CREATE, API_WORDS = 4, 6, 7
KIND, METADATA = 1, 3  # of the metadata extension
METADATA_VERSION, METADATA_TRAITS = 3, 4
DTYPE, DATA, RANK, DIMS = 2, 3, 4, 5  # of a buffer
VALUE = 1  # of a scalar attribute

# Values of its enumerations.
METADATA_EXTENSION, EXECUTE, BUFFER, SCALAR, INVALID_ARGUMENT = 1, 3, 1, 3, 3
S32, F16, F32, F64, BF16 = 4, 10, 11, 12, 16
