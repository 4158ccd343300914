"""Planned modules in trainers: weights equal those without a plan, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset, TensorDataset  # noqa: E402

from onnxgc.torch import checkpoint, plans_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK: dict[str, Any] = {"device": "a100", "time_limit": None, "step_limit": 2}


def drawn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def state(module: nn.Module) -> list[Tensor]:
    return [one.detach().clone() for one in (*module.parameters(), *module.buffers())]


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        layer
        for width in (3, 4, 4, 4)
        for layer in (nn.Conv2d(width, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU(), nn.Dropout(0.3))
    ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 64, 5))


def by_lightning(module: nn.Module, folder: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Classifier(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return nn.functional.cross_entropy(self.module(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-2)

    labels = torch.arange(20) % 5
    lightning.seed_everything(0, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), DataLoader(TensorDataset(drawn((20, 3, 8, 8)), labels), batch_size=8))


def language_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"n_embd": 32, "n_layer": 3, "n_head": 2, "vocab_size": 100, "n_positions": 32}
    config = transformers.GPT2Config(use_cache=False, bos_token_id=0, eos_token_id=0, **size)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


class Sentences(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def by_hugging_face(module: nn.Module, folder: Path) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=1,
    )
    transformers.Trainer(module, arguments, train_dataset=Sentences()).train()
    assert (folder / "checkpoint-4").is_dir()


def test_weights_under_lightning_are_equal(tmp_path: Path) -> None:
    plain = convolutional()
    planned = checkpoint(convolutional(), drawn((8, 3, 8, 8)), budget="70%", **QUICK)
    assert plans_of(planned)[0].repeated > 0
    for module in (plain, planned):
        by_lightning(module, tmp_path)
    # The last batch of an epoch is smaller, and has its own plan.
    assert len(plans_of(planned)) == 2
    assert all(map(torch.equal, state(plain), state(planned)))


def test_weights_under_the_trainer_of_transformers_are_equal(tmp_path: Path) -> None:
    plain = language_model()
    ids = torch.zeros(4, 16, dtype=torch.int64)
    named = {"input_ids": ids, "labels": ids}
    planned = checkpoint(language_model(), (), example_kwargs=named, budget="60%", **QUICK)
    assert plans_of(planned)[0].repeated > 0
    for name, module in (("plain", plain), ("planned", planned)):
        by_hugging_face(module, tmp_path / name)
    assert all(map(torch.equal, state(plain), state(planned)))
