"""The ranks of this tier: without a group, as torchrun starts them, for the tests of one file; and their folders."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.helpers.pool import Launches
from tests.recipes.launching import Run, write_text


@pytest.fixture(scope="module")
def pool() -> Iterator[Launches]:
    with closing(Launches(DS_ACCELERATOR="cpu")) as launches:
        yield launches


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(str(write_text(tmp_path_factory.mktemp("text"))), tmp_path_factory.mktemp("out"))


@pytest.fixture(scope="module")
def texts(run: Run) -> str:
    return run.texts
