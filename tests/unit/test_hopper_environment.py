"""Errors of the Hopper kernels on a machine that lacks something, before any launch. CPU."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from unittest import mock

import pytest
import torch

from ringflash_kernels.api import choose_impl
from ringflash_kernels.hopper import environment, implementation


@pytest.fixture(autouse=True)
def forget():
    environment.check_environment.cache_clear()
    yield
    environment.check_environment.cache_clear()


def with_triton(release: str):
    return mock.patch.object(environment, "version", return_value=release)


@pytest.mark.parametrize(
    ("release", "asked", "remedy"),
    [
        ("3.5.1", "", ", or use"),
        ("3.5.1", "3.5", ", or use"),
        ("3.10.0", "", ", set RINGFLASH_UNTESTED_TRITON=3.10 to try this one, or use"),
        ("4.0.0", "3.10", ", set RINGFLASH_UNTESTED_TRITON=4.0 to try this one, or use"),
    ],
)
def test_other_triton_releases_are_refused_by_name(
    release: str, asked: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGFLASH_UNTESTED_TRITON", asked)
    expected = rf"\(3.6 to 3.9\) .* got {release}; install such a release{remedy} impl='flash2'"
    with with_triton(release), pytest.raises(RuntimeError, match=expected):
        environment.check_environment()


def test_a_newer_triton_is_tried_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing one is named all the same."""
    monkeypatch.setenv("RINGFLASH_UNTESTED_TRITON", "3.10")
    missing = mock.patch.object(environment, "version", side_effect=PackageNotFoundError)
    with missing, pytest.raises(RuntimeError, match="got none; install"):
        environment.check_environment()
    with with_triton("3.10.0"):
        environment.check_environment()


@pytest.mark.parametrize("release", ["3.6.0", "3.9.0"])
def test_triton_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    """3.6 for every kernel; each release for its own access to the driver, once in a cache."""
    monkeypatch.delenv("CC", raising=False)
    with with_triton(release), mock.patch.object(environment.shutil, "which", return_value=None):
        with pytest.raises(RuntimeError, match="must find a C compiler .* install gcc, set CC, or use impl='flash2'"):
            environment.check_environment()


def test_triton_needs_pythons_header(tmp_path: Path) -> None:
    compiler = mock.patch.object(environment.shutil, "which", return_value="/usr/bin/gcc")
    header = mock.patch.object(environment.sysconfig, "get_paths", return_value={"include": str(tmp_path)})
    with with_triton("3.6.0"), compiler, header, pytest.raises(RuntimeError, match="Python's C header .* python3-dev"):
        environment.check_environment()


def test_hopper_without_its_means_is_an_error_for_auto() -> None:
    """Taking a slower kernel in silence would cost half the machine."""
    q = mock.Mock(spec=torch.Tensor, device=torch.device("cuda", 0), dtype=torch.bfloat16, shape=(1, 128, 4, 128))
    capability = mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0))
    with capability, with_triton("3.10.0"), pytest.raises(RuntimeError, match="triton must be"):
        choose_impl(q, q, q)


def test_elsewhere_nothing_is_asked_of_the_machine() -> None:
    q = torch.zeros(1, 8, 2, 64)
    with with_triton("2.0.0"):
        assert implementation.unsupported(q, q, q) == "device cpu (cuda only)"
