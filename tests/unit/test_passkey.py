"""Passkey sequences and scores. One process; over four ranks it runs in tests/recipes/test_strategy.py."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tokenizers import pre_tokenizers

from recipes.lightning import passkey
from recipes.lightning.passkey import Passkey, encoder, passkey_sequence
from tests.helpers.tokens import word_tokenizer


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_the_key_is_at_its_depth_and_is_asked_for(depth: float) -> None:
    ids, labels = passkey_sequence("48213", depth, 400, encoder("bytes"))
    text = bytes(ids[0].tolist()).decode()
    needle = "The pass key is 48213. Remember it. 48213 is the pass key. "
    question = "What is the pass key? The pass key is 48213"
    assert len(text) == 400 and text.endswith(question) and text.count("48213") == 3
    assert text.index(needle) == round(depth * (400 - len(needle) - len(question)))
    assert labels.tolist()[0] == [-100] * 394 + list(b"48213") + [-100]
    assert torch.equal(labels[0, :-1][labels[0, :-1] != -100], ids[0, 1:][labels[0, :-1] != -100])


def test_a_length_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="seqlen must be 102 or more for a pass key, got 60"):
        passkey_sequence("48213", 0.5, 60, encoder("bytes"))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"depths": []}, "must be fractions"), ({"depths": [1.5]}, "must be fractions"), ({"num_keys": 0}, "1 or")],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Passkey(**options)


def copying(right: bool) -> Any:
    """A model that has found every key, or that misses the last digit of each."""

    def model(*, shift_labels: torch.Tensor, per_token: bool, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert per_token
        correct = shift_labels != -100
        if not right:
            correct[:, -2] = False
        return correct.float(), correct

    return model


@pytest.mark.parametrize(("right", "keys", "loss"), [(True, 1.0, 1.0), (False, 0.0, 0.8)])
def test_a_key_counts_when_every_token_is_right(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, right: bool, keys: float, loss: float
) -> None:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        ring = SimpleNamespace(root_device=torch.device("cpu"), cp_group=dist.group.WORLD, layout="zigzag")
        monkeypatch.setattr(passkey, "strategy_of", lambda trainer: ring)
        logged: list[tuple[dict[str, float], int]] = []
        trainer = SimpleNamespace(
            datamodule=SimpleNamespace(seqlen=256), precision_plugin=SimpleNamespace(forward_context=nullcontext),
            loggers=[SimpleNamespace(log_metrics=lambda values, step: logged.append((values, step)))], global_step=7,
        )  # fmt: skip
        callback = Passkey(depths=(0.0, 0.5))
        callback.on_validation_end(trainer, copying(right))
    finally:
        dist.destroy_process_group()
    assert [(found.keys, found.loss) for found in callback.found.values()] == [(keys, pytest.approx(loss))] * 2
    assert logged == [({"passkey/0": keys, "passkey/0.5": keys}, 7)]


def test_a_tokenizer_of_a_directory_is_used(tmp_path: Path) -> None:
    word_tokenizer(["[UNK]", "pass", "key", "is"], pre_tokenizers.Whitespace()).save_pretrained(tmp_path)
    assert encoder(str(tmp_path))("The pass key is 3") == [0, 1, 2, 3, 0]
