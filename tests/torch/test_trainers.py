import copy
import functools
import os
import socket
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from onnxgc.torch import checkpoint, plans_of
from tests.test_readme import SHORT_SEARCH, code_blocks, copy_models

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


@pytest.mark.filterwarnings("ignore")
def test_weights_under_lightning_are_equal(tmp_path: Path) -> None:
    plain = convolutional()
    planned = checkpoint(convolutional(), drawn((8, 3, 8, 8)), budget="70%", **QUICK)
    assert plans_of(planned)[0].repeated > 0
    for module in (plain, planned):
        by_lightning(module, tmp_path)
    # The last batch of an epoch is smaller, and has its own plan.
    assert len(plans_of(planned)) == 2
    assert all(map(torch.equal, state(plain), state(planned)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_weights_under_the_trainer_of_transformers_are_equal(tmp_path: Path) -> None:
    plain = language_model()
    ids = torch.zeros(4, 16, dtype=torch.int64)
    named = {"input_ids": ids, "labels": ids}
    planned = checkpoint(language_model(), (), example_kwargs=named, budget="60%", **QUICK)
    assert plans_of(planned)[0].repeated > 0
    for name, module in (("plain", plain), ("planned", planned)):
        by_hugging_face(module, tmp_path / name)
    assert all(map(torch.equal, state(plain), state(planned)))


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())


def planned_layers() -> nn.Module:
    found: nn.Module = checkpoint(layers(), torch.randn(4, 8), budget="100%", **QUICK)
    return found


def by_accelerate(module: nn.Module) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    # Trainers set another state for the process.
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    prepared: nn.Module = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(module)
    return prepared


def by_hooks(module: nn.Module) -> nn.Module:
    hooks = pytest.importorskip("accelerate.hooks")
    hooked: nn.Module = hooks.add_hook_to_module(module, hooks.ModelHook())
    return hooked


def in_another_forward(wrap: Callable[[Any], Any]) -> Callable[[nn.Module], nn.Module]:
    def wrapped(module: nn.Module) -> nn.Module:
        module.forward = wrap(module.forward)
        return module

    return wrapped


def with_a_closure(forward: Any) -> Any:
    return lambda *arguments: forward(*arguments) * 2


def with_a_name(forward: Any) -> Any:
    @functools.wraps(forward)
    def named(*arguments: Any) -> Any:
        return forward(*arguments)

    return named


def of_an_instance(forward: Any) -> Any:
    class Caller:
        def __init__(self) -> None:
            self.inner = forward

        def __call__(self, *arguments: Any) -> Any:
            return self.inner(*arguments)

    return Caller()


class Adapter(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.ModuleDict({"model": module})

    def forward(self, x: Any) -> Any:
        return self.base_model["model"](x)


# PyTorch warns when it imports its compiler.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "wrap",
    [
        lambda module: module,
        nn.DataParallel,
        Adapter,
        lambda module: Adapter(nn.Sequential(layers(), Adapter(module))),
        torch.compile,
        copy.deepcopy,
        by_accelerate,
        by_hooks,
        in_another_forward(with_a_closure),
        in_another_forward(with_a_name),
        in_another_forward(functools.partial),
        in_another_forward(of_an_instance),
        in_another_forward(lambda forward: types.MethodType(lambda self, *given: forward(*given), object())),
        in_another_forward(lambda forward: with_a_name(with_a_closure(functools.partial(forward)))),
    ],
)
def test_a_plan_is_found_inside_wrappers(wrap: Callable[[nn.Module], nn.Module]) -> None:
    planned = planned_layers()
    plans = plans_of(planned)
    assert len(plans) == 1
    assert plans_of(wrap(planned)) == plans


def test_plans_of_submodules_are_ordered_and_unique() -> None:
    first, second = planned_layers(), checkpoint(layers(), torch.randn(6, 8), budget="100%", **QUICK)
    model = nn.Sequential(first, layers(), second, first)
    assert plans_of(model) == (*plans_of(first), *plans_of(second))
    assert plans_of(layers()) == ()


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_two_ranks_train_to_equal_weights() -> None:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    common = {**os.environ, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.torch.two_ranks"],
            env={**common, "RANK": str(rank), "WORLD_SIZE": "2"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    for rank, text in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, text
        assert text.count("26 parameters are equal") == 2


@pytest.fixture
def plain_and_planned() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.GELU())))
    options: dict[str, Any] = {"budget": "90%", "device": "a100", "time_limit": None, "step_limit": 2}
    return plain, checkpoint(copy.deepcopy(plain), torch.randn(32, 16), **options)


def test_gradients_under_compile_are_equal(plain_and_planned: tuple[nn.Module, nn.Module]) -> None:
    plain, planned = plain_and_planned
    data = torch.randn(32, 16)
    for module in (plain, torch.compile(planned, backend="eager")):
        module(data).square().mean().backward()
    for one, other in zip(plain.parameters(), planned.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_scaled_and_accumulated_gradients_are_equal(plain_and_planned: tuple[nn.Module, nn.Module]) -> None:
    data = torch.randn(64, 16)
    for module in plain_and_planned:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for _ in range(2):
            for part in data.chunk(2):
                scaler.scale(module(part).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert all(map(torch.equal, *(list(module.parameters()) for module in plain_and_planned)))


ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_blocks_run_in_order(tmp_path: Path) -> None:
    copy_models(tmp_path, are_short=True)
    text = "\n".join(text for language, text in code_blocks(ROOT / "docs" / "pytorch.md") if language == "python")
    text = text.replace("time_limit=2", f"time_limit={SHORT_SEARCH}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", text], cwd=tmp_path, env=environment, check=True, timeout=300)
