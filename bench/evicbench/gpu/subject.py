"""Models of random weights that the server phase serves: sizes they are measured at, and a check of their cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evicbench.gpu.figures import Figure, check
from evicbench.gpu.machine import Settings
from evicbench.gpu.models import LLAMA_8B, Model, write_model
from evicbench.gpu.serving import Launch, Server
from evicbench.testbed.server import MODEL

PRESS = "keydiff"
KEPT = (1.0, 0.5, 0.2)


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to be served and the sizes it is measured at, in tokens."""

    name: str
    folder: Path
    vocabulary: int
    launch: Launch
    context: int  # shared by all requests about it
    question: int
    answer: int  # tokens of an answer whose steps are timed
    batch: int
    batch_rows: int  # physical tokens of the rows of a batch together
    host_gb: float
    ssd_gb: float
    fits_twice: bool  # whether two servers fit the GPU beside each other

    @property
    def forms(self) -> str:
        return ",".join(f"{PRESS}@{kept}" for kept in KEPT if kept < 1.0)

    @property
    def policy(self) -> tuple[str, ...]:
        return "--kv-policy", "evicpress", "--kv-alpha", "1", "--kv-disable-online-profiling", "--kv-forms", self.forms


def subject_of(model: Model, chosen: Settings, made: Path) -> Subject:
    """Whole sizes on the GPU; on the CPU the testbed's model, at sizes that only show that the script works."""
    if chosen.device == "cpu":
        launch = Launch(MODEL, "cpu", dtype="float32", context=4096)
        return Subject(f"testbed for {model.name}", MODEL, 512, launch, 1200, 8, 24, 4, 1024, 0.2, 1.0, True)
    folder = write_model(model, made / model.name)
    launch = Launch(folder, "cuda", graphs=32, is_dummy=True, memory=0.85)
    vocabulary, is_small = model.config["vocab_size"], model is LLAMA_8B
    return Subject(model.name, folder, vocabulary, launch, 32768, 32, 128, 32, 131072, 16.0, 40.0, is_small)


def integrity(subject: Subject, what: str, server: Server) -> Figure:
    found = server.post("/evicpress/check")["violations"]
    return check(f"{subject.name}: integrity after {what}", not found, str(found[:1] or "no violation"), "no violation")
