"""torch_xla 2.9 brings files of a torchax of its own that belong to no package; these tests want the package."""

from importlib.metadata import PackageNotFoundError, version

import pytest


@pytest.fixture(autouse=True, scope="module")
def torchax(request):
    if request.module.__name__.endswith("test_frontends"):  # says what is said where something is missing
        return
    try:
        version("torchax")
    except PackageNotFoundError:
        pytest.skip("captures through torchax, which is not installed")
