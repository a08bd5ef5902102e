# SPDX-License-Identifier: Apache-2.0
"""pytest: the fixture ringattn_goldens, a Goldens of the file goldens/<module>.json beside the test; --ringattn-record writes it.

def test_prefill(ringattn_goldens):
    out, lse = ringattn.attention(q, k, v)
    ringattn_goldens.check("prefill", out=out, lse=lse)"""

import pytest


def pytest_addoption(parser):
    parser.getgroup("ringattn").addoption(
        "--ringattn-record",
        action="store_true",
        help="write the bits of this machine into goldens/ instead of comparing them",
    )


@pytest.fixture
def ringattn_goldens(request):
    from .goldens import Goldens

    path = request.path.parent / "goldens" / f"{request.path.stem}.json"
    return Goldens(path, record=request.config.getoption("--ringattn-record"))
