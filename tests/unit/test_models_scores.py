"""Value and reward models against transformers' own classes, and checkpoints that must be refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf.config.checkpoints import check_reward_checkpoint, compare_tokenizers
from rlhf.models.backbone import ScalarHead
from rlhf.models.batch import PaddedBatch, pad_batch
from rlhf.models.load import load_causal_lm
from rlhf.models.reward import load_reward_model
from rlhf.models.value import load_value_model
from rlhf.trajectories import Columns
from tests.tiny import Architecture, make_tiny_model, make_tiny_reward_model


def columns(prompt: list[int], response: list[int]) -> Columns:
    return Columns.from_completion(prompt, response, [-1.0] * len(response), 0)


# Of different lengths, with <eos> (2) and <pad> (0) inside and at the end.
SAMPLES = [columns([5, 76, 5], [84, 7, 2]), columns([2, 5, 76, 0, 9, 9, 9], [84]), columns([5, 2], [2, 7, 2, 2, 0, 0])]


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def reward_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture: Architecture = request.param
    return make_tiny_reward_model(tmp_path_factory.mktemp("reward") / architecture, architecture=architecture)


def plain_scores(folder: Path, sample: Columns) -> list[float]:
    """transformers' score head at every position of one sequence alone, without its pooling."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        hidden = model.model(torch.from_numpy(sample.token_ids.astype(np.int64))[None]).last_hidden_state
        scores: list[float] = model.score(hidden)[0, :, 0].tolist()
    return scores


class TestRewardModel:
    def test_score_is_read_at_the_last_real_token_whatever_the_ids(self, reward_folder: Path) -> None:
        model = load_reward_model(str(reward_folder), "float32")
        with torch.no_grad():
            scores = model(pad_batch(SAMPLES, "cpu"))
        assert scores.dtype == torch.float32
        assert scores.tolist() == pytest.approx([plain_scores(reward_folder, s)[-1] for s in SAMPLES], abs=1e-5)
        assert float(scores.std()) > 0.1

    def test_padding_never_reaches_a_score(self, reward_folder: Path) -> None:
        model = load_reward_model(str(reward_folder), "float32")
        batch = pad_batch(SAMPLES, "cpu")
        garbage = batch.input_ids_BL.clone()
        garbage[torch.arange(garbage.shape[1]) >= batch.lengths_B[:, None]] = 77
        assert not torch.equal(garbage, batch.input_ids_BL)
        with torch.no_grad():
            scores = model(batch)
            other = model(PaddedBatch(garbage, batch.position_ids_BL, batch.lengths_B, *[batch.rows_N] * 3))
        assert torch.equal(scores, other)

    def test_bfloat16_scores_are_computed_in_float32_from_the_hidden_states(self, reward_folder: Path) -> None:
        # Scores of 256 and more have a spacing of 2 in bfloat16: odd ones exist only in float32.
        head = ScalarHead(torch.tensor([[256.0, 1.0]], dtype=torch.bfloat16))
        assert head(torch.ones(1, 2, dtype=torch.bfloat16)).tolist() == [257.0]
        model = load_reward_model(str(reward_folder), "bfloat16")
        with torch.no_grad():
            scores = model(pad_batch(SAMPLES, "cpu"))
        assert scores.dtype == torch.float32
        expected = [plain_scores(reward_folder, s)[-1] for s in SAMPLES]
        np.testing.assert_allclose(scores.numpy(), expected, atol=0.2)


class TestValueModel:
    def test_value_of_a_token_is_read_at_the_state_before_it(self, reward_folder: Path) -> None:
        model = load_value_model(str(reward_folder), "float32", "checkpoint")
        values = model(pad_batch(SAMPLES, "cpu"))
        expected = [plain_scores(reward_folder, s)[t - 1] for s in SAMPLES for t in np.flatnonzero(s.loss_mask)]
        assert values.dtype == torch.float32
        assert values.tolist() == pytest.approx(expected, abs=1e-5)

    def test_new_head_starts_at_zero_and_learns_from_the_first_update(self, tiny_untied: Path) -> None:
        model = load_value_model(str(tiny_untied), "float32", "new")
        values = model(pad_batch(SAMPLES, "cpu"))
        assert values.tolist() == [0.0] * 10
        (values - 1).square().sum().backward()
        assert model.lm.score.weight.grad.norm() > 0
        backbone = load_causal_lm(str(tiny_untied), "float32").model.state_dict()
        assert all(torch.equal(backbone[name], value) for name, value in model.lm.model.state_dict().items())

    def test_new_head_replaces_one_that_the_checkpoint_has(self, tmp_path: Path) -> None:
        folder = make_tiny_reward_model(tmp_path / "classes", labels=3)
        values = load_value_model(str(folder), "float32", "new")(pad_batch(SAMPLES, "cpu"))
        assert values.tolist() == [0.0] * 10

    def test_auto_takes_the_head_where_there_is_one(self, reward_folder: Path, tiny_untied: Path) -> None:
        batch = pad_batch(SAMPLES, "cpu")
        own = load_value_model(str(reward_folder), "float32", "checkpoint")(batch)
        assert torch.equal(load_value_model(str(reward_folder), "float32", "auto")(batch), own)
        assert not load_value_model(str(tiny_untied), "float32", "auto")(batch).any()

    def test_what_it_saves_is_a_checkpoint_with_its_head(self, tmp_path: Path, tiny_tied: Path) -> None:
        model = load_value_model(str(tiny_tied), "float32", "new")
        torch.nn.init.normal_(model.lm.score.weight)
        model.lm.save_pretrained(tmp_path / "critic")
        assert check_reward_checkpoint(str(tmp_path / "critic")) is None
        again = load_value_model(str(tmp_path / "critic"), "float32", "checkpoint")
        batch = pad_batch(SAMPLES, "cpu")
        assert torch.equal(again(batch), model(batch))

    def test_dropout_is_switched_off_and_reported_once(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        folder = make_tiny_reward_model(tmp_path / "model", attention_dropout=0.5)
        with caplog.at_level(logging.WARNING):
            model = load_value_model(str(folder), "float32", "checkpoint").train()
        batch = pad_batch(SAMPLES, "cpu")
        assert torch.equal(model(batch), model(batch))
        assert len([r for r in caplog.records if "attention_dropout 0.5" in r.getMessage()]) == 1


def rename_head(folder: Path, name: str) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = tensors.pop("score.weight")
    save_file(tensors, file, metadata={"format": "pt"})


def edit_config(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


class TestRefusals:
    """Each is refused by its files alone and, should that be passed over, when it is loaded."""

    def test_a_good_checkpoint_passes(self, reward_folder: Path) -> None:
        assert check_reward_checkpoint(str(reward_folder)) is None

    def test_a_plain_language_model(self, tiny_untied: Path) -> None:
        problem = check_reward_checkpoint(str(tiny_untied))
        assert problem is not None and str(tiny_untied) in problem
        assert "Qwen2ForCausalLM, whose score head would be random" in problem
        for load in (load_reward_model, lambda path, dtype: load_value_model(path, dtype, "checkpoint")):
            with pytest.raises(ValueError, match=r"lacks score\.weight, which would be random") as error:
                load(str(tiny_untied), "float32")
            assert str(tiny_untied) in str(error.value)

    def test_a_language_model_that_calls_itself_a_classifier(self, tmp_path: Path) -> None:
        folder = make_tiny_model(tmp_path / "model")
        edit_config(folder, architectures=["Qwen2ForSequenceClassification"], id2label={"0": "LABEL_0"})
        problem = check_reward_checkpoint(str(folder))
        assert problem is not None and "no tensor score.weight (it has no tensor with one output)" in problem
        with pytest.raises(ValueError, match=r"lacks score\.weight"):
            load_reward_model(str(folder), "float32")

    def test_a_head_under_another_name(self, tmp_path: Path) -> None:
        folder = make_tiny_reward_model(tmp_path / "model")
        rename_head(folder, "v_head.summary.weight")
        problem = check_reward_checkpoint(str(folder))
        assert problem is not None and "no tensor score.weight (it has v_head.summary.weight)" in problem
        with pytest.raises(ValueError, match=r"lacks score\.weight"):
            load_reward_model(str(folder), "float32")

    @pytest.mark.parametrize("labels", [2, 3])
    def test_more_than_one_output(self, tmp_path: Path, labels: int) -> None:
        folder = make_tiny_reward_model(tmp_path / "model", labels=labels)
        problem = check_reward_checkpoint(str(folder))
        assert problem is not None and f"num_labels is {labels}" in problem
        with pytest.raises(ValueError, match=f"num_labels {labels}: a score is one number"):
            load_reward_model(str(folder), "float32")

    def test_a_checkpoint_that_lacks_a_layer(self, tmp_path: Path) -> None:
        folder = make_tiny_model(tmp_path / "model")
        file = folder / "model.safetensors"
        tensors = load_file(file)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight, which would be random"):
            load_causal_lm(str(folder), "float32")
        with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
            load_value_model(str(folder), "float32", "new")

    def test_an_encoder_whose_attention_sees_padding(self, tmp_path: Path) -> None:
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            vocab_size=104, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
        config.num_labels = 1
        BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
        problem = check_reward_checkpoint(str(tmp_path / "bert"))
        assert problem is not None and "no tensor score.weight (it has classifier.weight)" in problem
        with pytest.raises(ValueError, match="has no `score` head"):
            load_reward_model(str(tmp_path / "bert"), "float32")


class TestReadingFiles:
    def test_the_head_is_found_in_any_of_several_files(self, tmp_path: Path) -> None:
        from transformers import AutoModelForSequenceClassification

        folder = make_tiny_reward_model(tmp_path / "one")
        AutoModelForSequenceClassification.from_pretrained(folder).save_pretrained(
            tmp_path / "many", max_shard_size="200KB"
        )
        assert (tmp_path / "many" / "model.safetensors.index.json").exists()
        assert check_reward_checkpoint(str(tmp_path / "many")) is None

    def test_weights_in_another_format_are_judged_by_the_configuration(self, tmp_path: Path) -> None:
        folder = make_tiny_reward_model(tmp_path / "model")
        (folder / "model.safetensors").unlink()
        assert check_reward_checkpoint(str(folder)) is None
        edit_config(folder, id2label={"0": "bad", "1": "good"})
        problem = check_reward_checkpoint(str(folder))
        assert problem is not None and "num_labels is 2" in problem

    def test_a_hub_name_can_not_be_told_and_a_folder_that_is_not_there_can(self, tmp_path: Path) -> None:
        assert check_reward_checkpoint("someone/reward-model") is None
        problem = check_reward_checkpoint(str(tmp_path / "nowhere"))
        assert problem is not None and "no such folder" in problem

    @pytest.mark.parametrize("content", [b"", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]"])
    def test_files_that_are_broken_are_a_message_and_not_a_traceback(self, tmp_path: Path, content: bytes) -> None:
        folder = make_tiny_reward_model(tmp_path / "model")
        (folder / "model.safetensors").write_bytes(content)
        problem = check_reward_checkpoint(str(folder))
        assert problem is not None and "can't be read: model.safetensors is not a safetensors file" in problem
        (folder / "config.json").write_text("[")
        problem = check_reward_checkpoint(str(folder))
        assert problem is not None and "can't be read" in problem

    def test_tokenizers_have_to_give_every_token_the_policys_id(self, tmp_path: Path, tiny_untied: Path) -> None:
        folder = make_tiny_reward_model(tmp_path / "model")
        assert compare_tokenizers(str(folder), str(tiny_untied)) is None
        assert compare_tokenizers("someone/reward-model", str(tiny_untied)) is None
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text())
        content["model"]["vocab"]["more"] = 104
        file.write_text(json.dumps(content))
        # One token more hurts nobody; two that are exchanged do. '0' is 4 and '1' is 5.
        assert compare_tokenizers(str(folder), str(tiny_untied)) is None
        content["model"]["vocab"] |= {"0": 5, "1": 4}
        file.write_text(json.dumps(content))
        problem = compare_tokenizers(str(folder), str(tiny_untied))
        assert problem is not None and "for 2 tokens: '0' is 4 there and 5 here" in problem
