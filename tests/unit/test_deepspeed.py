"""Refusals of DeepSpeed's helper and strategy before any process joins. CPU, one process; needs the extras."""

import re
import sys
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch

pytest.importorskip("deepspeed")
pytest.importorskip("lightning")

from recipes.deepspeed.strategy import (
    DeepSpeedContextParallelStrategy,
    _check_device,
    _check_precision,
    _num_ranks_error,
)
from ringflash.deepspeed import context_mesh, initialize
from ringflash.deepspeed.engine import _signature
from ringflash.deepspeed.refusals import check

ZERO_OF_FP16 = "fp16 must have a ZeRO stage of 1, 2 or 3, got 0"


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"sequence_parallel_size": 1}, ValueError, "sequence_parallel_size must not be in the config, got 1"),
        ({"data_parallel_size": 2}, ValueError, "data_parallel_size must not be in the config, got 2"),
        ({"gradient_allreduce_op": "sum"}, ValueError, "gradient_allreduce_op must be 'mean', got 'sum'"),
        ({"data_efficiency": {"enabled": True}}, ValueError, "data_efficiency.enabled must be false, .* .each rank"),
        ({"train_batch_size": 8}, ValueError, "train_batch_size must not be .*, got 8; DeepSpeed counts every rank"),
        ({"zero_optimisation": {"stage": 3}}, ValueError, "got zero_optimisation, .*zero_optimization"),
        ({"bf16": {"enabled": "auto"}}, ValueError, "must have values, got 'auto' for bf16.enabled, which only transf"),
        ({"bf16": True}, ValueError, "must be one that DeepSpeed takes, got TypeError: .* must be a mapping, not bool"),
        ({"zero_optimization": {"stge": 3}}, ValueError, "one that DeepSpeed takes, got ValidationErr.*\n.*stge"),
        ({"tensor_parallel": {"autotp_size": 2}}, NotImplementedError, "autotp_size must be 0 or 1, got 2"),
        (
            {"expert_parallel": {"enabled": True}},
            NotImplementedError,
            "expert_parallel.enabled must be false, got true",
        ),
        # A loss that is not scaled makes steps far too small.
        ({"fp16": {"enabled": True}}, NotImplementedError, ZERO_OF_FP16),
        ({"fp16": {"enabled": "true"}, "zero_optimization": {"stage": "0"}}, NotImplementedError, ZERO_OF_FP16),
    ],
)
def test_configs_that_train_otherwise_are_refused(config: Any, error: type[Exception], message: str) -> None:
    """The check refuses them, and a strategy as soon as it is made; what DeepSpeed would ignore or fail for, too."""
    with pytest.raises(error, match=message):
        check(config, {})
    with pytest.raises(error, match=message):
        DeepSpeedContextParallelStrategy(config=config)


def test_what_keeps_the_average_passes() -> None:
    """Keywords that are None are those of a caller who passes everything on."""
    same = {"gradient_allreduce_op": "mean", "tensor_parallel": {"autotp_size": 1}, "gradient_clipping": 0}
    check({"zero_optimization": {"stage": 3}, **same}, {"mpu": None, "mesh_param": None})
    check({"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}, {})


@pytest.mark.parametrize(
    ("config", "keywords", "message"),
    [
        ({"gradient_clipping": -1.0}, {}, "gradient_clipping must be a norm of at least 0, got "),  # clips nothing
        ({"gradient_clipping": "1.0"}, {}, "gradient_clipping must be a norm of at least 0, got "),
        # Ranks of a ring would hold parts of different sequences.
        ({}, {"training_data": [1, 2]}, "training_data must be None, got list, which DeepSpeed distributes"),
    ],
)
def test_other_arguments_of_initialize_are_refused(config: Any, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(config, keywords)


@pytest.mark.parametrize(("keyword", "name"), [("optimizer", "optimizer"), ("lr_scheduler", "scheduler")])
def test_what_is_given_twice_is_refused(keyword: str, name: str) -> None:
    """DeepSpeed takes the keyword; one of the two is accepted."""
    check({name: {"type": "Adam"}}, {keyword: None})
    check({}, {keyword: object()})
    with pytest.raises(ValueError, match=f"{name} must not be in the config together with {keyword}=, got .*Adam"):
        check({name: {"type": "Adam"}}, {keyword: object()})


def test_optimizer_has_one_place_with_lightning() -> None:
    """Lightning would train with the config's, at another rate than the module's."""

    class Module(lightning.LightningModule):
        def configure_optimizers(self) -> None: ...

    strategy = DeepSpeedContextParallelStrategy(config={"optimizer": {"type": "Adam", "params": {"lr": 1.0}}})
    with pytest.raises(ValueError, match="optimizer must not be in the config of a module that has configure_optimiz"):
        strategy._initialize_deepspeed_train(Module())


@pytest.mark.parametrize(("precision", "key"), [("32-true", "bf16"), ("bf16-mixed", "fp16"), ("bf16-true", "bf16")])
def test_precision_has_one_place_with_lightning(precision: str, key: str) -> None:
    """DeepSpeed would train in the config's; where both say the same, the config may say more."""
    _check_precision({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, "bf16-mixed")
    _check_precision({"fp16": {"enabled": True, "loss_scale": 64}}, "16-mixed")
    for enabled in (True, 1, "true"):
        with pytest.raises(ValueError, match=f"must be that of the config, got {precision} and {key}.enabled"):
            _check_precision({key: {"enabled": enabled if precision != "bf16-true" else not enabled}}, precision)
    with pytest.raises(ValueError, match=f"that of the config, got {precision} and torch_autocast.enabled true"):
        _check_precision({"torch_autocast": {"enabled": True}}, precision)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "config must be a dictionary or a JSON file, got .*ds.json: .* No such file"),
        ("{,}", "config must be a dictionary or a JSON file, got .*ds.json: Expecting"),
        ("[1]", "config must be an object of JSON, got list"),
        ('{"bf16": {}, "bf16": {}}', "config must be a dictionary or a JSON file, .*: bf16 is given more than once"),
        ("{}", "config_params must be None, got dict, which DeepSpeed ignores"),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    """The path is in the message; so is a second config given with it."""
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=message):
        initialize(model=torch.nn.Linear(1, 1), config=path, config_params={"train_batch_size": 8})


def test_long_configs_are_compared_by_checksum() -> None:
    """The message between ranks has a fixed size; a difference at the end of a long config shows all the same."""
    config = {f"key_{i}": i for i in range(1000)}
    assert "checksum" in str(_signature(config)["config"])
    assert _signature(config) != _signature({**config, "key_999": 0})
    assert _signature({"key_2": 2}) == {"keys": ["key_2"], "key_2": 2}


def test_options_with_a_config_are_refused(tmp_path: Path) -> None:
    """Lightning makes a config of them if there is none, or adds its keys; a command line gives their defaults."""
    config = {"zero_optimization": {"stage": 1}}
    assert DeepSpeedContextParallelStrategy(config=config).config is not config, "the caller's must stay as it is"
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 1}}')
    assert DeepSpeedContextParallelStrategy(config=str(path), stage=2, loss_scale=64.0).zero_stage_3 is False
    for options, message in (
        ({"config": str(path), "stage": 3}, "stage must not be given together with config, got 3; set it in the conf"),
        ({"stage": 3, "remote_device": "nvme"}, "remote_device must be None, got nvme; every rank builds the whole"),
        ({"config": {"gradient_clipping": 1.0}}, "gradient_clipping must not be in the config, got 1.0; set Trainer"),
    ):
        with pytest.raises(ValueError, match=message):
            DeepSpeedContextParallelStrategy(**options)


@pytest.mark.parametrize(
    ("model_parts", "num_ranks", "continued", "told"),
    [
        (["mp_rank_00"], 2, True, None),
        (["mp_rank_00"], 4, True, "of 4 ranks, got .*, which 2 have written; start 2 ranks, or make a universal"),
        (["mp_rank_00"], 4, False, None),
        (["zero_pp_rank_0_mp_rank_00", "zero_pp_rank_1_mp_rank_00"], 1, False, None),
        (["zero_pp_rank_0_mp_rank_00", "zero_pp_rank_1_mp_rank_00"], 1, True, "of 1 ranks, got .*, which 2 have"),
        (["zero_pp_rank_0_mp_rank_00", "zero_pp_rank_1_mp_rank_00"], 4, False, "2 have written; start at most 2 ranks"),
    ],
)
def test_a_checkpoint_of_other_ranks(
    tmp_path: Path, model_parts: list[str], num_ranks: int, continued: bool, told: str | None
) -> None:
    """Two ranks have written it, at stages 1 and 3: DeepSpeed fails, at stage 3 on some ranks only."""
    (tmp_path / "checkpoint").mkdir()
    names = [f"{part}_model_states.pt" for part in model_parts]
    for name in (*names, *(f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2))):
        (tmp_path / "checkpoint" / name).touch()
    error = _num_ranks_error(tmp_path, num_ranks, continued)
    assert error is None if told is None else re.search(told, str(error))


def test_other_devices_models_and_times_are_refused() -> None:
    """A sharded model's parameters all look like vectors, and decay would pass them by."""
    with pytest.raises(ValueError, match="must be the trainer's .tpu., got .*; set DS_ACCELERATOR=tpu before"):
        _check_device("tpu")
    with pytest.raises(RuntimeError, match="device_mesh must be read after the processes have joined"):
        _ = DeepSpeedContextParallelStrategy(stage=1).device_mesh
    model = torch.nn.Linear(2, 2)
    model.weight.ds_id = 0  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"model must be whole before stage 3 trains it.*call fit\(\) first"):
        DeepSpeedContextParallelStrategy(stage=3)._initialize_deepspeed_train(model)


def test_a_script_without_a_launcher_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed would miss mpi4py."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(RuntimeError, match="started by a launcher, .* got one process .*; start it by torchrun"):
        context_mesh()
