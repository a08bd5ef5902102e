# SPDX-License-Identifier: Apache-2.0
"""pytest plugin: the fixture ringattn_goldens is a Goldens of goldens/<module>.json next to the test. --ringattn-record
writes it.

def test_prefill(ringattn_goldens):
    out, lse = ringattn.attention(q, k, v)
    ringattn_goldens.check("prefill", out=out, lse=lse)"""

import pytest

_MISSING = ("fail", "skip", "record")


def pytest_addoption(parser):
    group = parser.getgroup("ringattn")
    group.addoption(
        "--ringattn-record",
        action="store_true",
        help="write the bits of this machine into goldens/ instead of comparing them",
    )
    group.addoption(
        "--ringattn-missing",
        choices=_MISSING,
        help="what to do where no golden of this build and machine was recorded: fail, skip the test, or record it "
        "with a warning [fail, or ringattn_missing of the configuration file]",
    )
    group.addoption(
        "--ringattn-device",
        metavar="DEVICE",
        help="whose bits are checked: cpu, or a GPU such as cuda:0, for host copies of what a GPU computes [where each "
        "array lies, or ringattn_device of the configuration file]",
    )
    parser.addini("ringattn_missing", "as --ringattn-missing")
    parser.addini("ringattn_device", "as --ringattn-device")


@pytest.fixture
def ringattn_goldens(request):
    """parametrize(…, indirect=True) passes the device of one test."""
    from .goldens import Goldens

    class Skipping(Goldens):
        def lacks(self, error):
            pytest.skip(str(error))

    config = request.config
    missing = config.getoption("--ringattn-missing") or config.getini("ringattn_missing") or "fail"
    if missing not in _MISSING:
        raise pytest.UsageError(f"ringattn_missing is {missing!r} (there are {', '.join(_MISSING)}). Correct it.")
    device = config.getoption("--ringattn-device") or config.getini("ringattn_device")
    device = getattr(request, "param", None) or device
    given = {"record": config.getoption("--ringattn-record"), "device": device or None}
    path = request.path.parent / "goldens" / f"{request.path.stem}.json"
    return Skipping(path, **given) if missing == "skip" else Goldens(path, **given, missing=missing)
