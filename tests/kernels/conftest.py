"""The back ends that the conformance tests hold to the same oracles."""

from __future__ import annotations

import pytest
from back_ends import BACK_ENDS, make_back_end

from titan.kernels.interfaces import Backend


@pytest.fixture(scope="session", params=BACK_ENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return make_back_end(request.param)
