"""The soak of cpu_inplace, in its short form, and that it sees what is wrong."""

import json

from benchmarks import soak_cpu_inplace
from jrope._primitive import bind_rope


def test_a_short_soak(capsys):
    short = ["--calls", "4000", "--steady", "100000", "--json"]
    assert soak_cpu_inplace.main(short) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["calls"] >= 4000 and found["elements"] > 10**5
    assert (found["over_bound"], found["changed_operands"]) == (0, 0)
    memory = found["steady"]
    grown = memory["resident_bytes_after"] - memory["resident_bytes_before"]
    # A call that kept 100 bytes would show.
    assert grown < 100 * memory["calls"]


def test_the_soak_sees_a_wrong_feature(monkeypatch, capsys):
    def wrong(xs, *rows, **style):
        outs = bind_rope(xs, *rows, **style)
        return [out.at[..., style["rotary_offset"]].multiply(1.01) for out in outs]

    monkeypatch.setattr(soak_cpu_inplace, "bind_rope", wrong)
    monkeypatch.setattr(soak_cpu_inplace, "STEPS", 10)
    assert soak_cpu_inplace.main(["--calls", "20", "--steady", "1000"]) == 1
    assert "over_bound: 0" not in capsys.readouterr().out
