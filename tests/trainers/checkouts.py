"""The trainers whose attention is called here: where their code comes from, and how one file of it
is imported where the rest of the trainer, or a package that it imports, is not installed."""

import importlib
import importlib.machinery
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

#: A folder with a checkout of each trainer, named as in TRAINERS.
VARIABLE = "SAGEBWD_TRAINERS"


@dataclass(frozen=True)
class Trainer:
    url: str
    commit: str  #: the one that was looked up
    files: tuple  #: what the tests need, all else may be missing
    below: str = ""  #: the folder from which its modules are imported

    def packages(self, name):
        """The folders from which its modules are imported."""
        return folder_of(name) / self.below


TRAINERS = {
    "axolotl": Trainer(
        "https://github.com/axolotl-ai-cloud/axolotl",
        "067b021c8b87a9e5e380b9173c704cf7340e30f5",
        ("src/axolotl/__init__.py", "src/axolotl/integrations/base.py",
         "src/axolotl/monkeypatch/attention", "src/axolotl/telemetry", "src/axolotl/utils"),
        "src"),
    "trl": Trainer(
        "https://github.com/huggingface/trl", "f2cd57710ae345ea6428ae95363267fcf38a3dc8",
        ("trl/trainer/sft_trainer.py", "trl/trainer/utils.py", "trl/import_utils.py")),
    "torchtitan": Trainer(
        "https://github.com/pytorch/torchtitan", "b5bcd76c66d0acb1a08b176d9639425bc55e0b2a",
        ("torchtitan/config", "torchtitan/distributed", "torchtitan/models/common",
         "torchtitan/observability", "torchtitan/protocols", "torchtitan/tools",
         "torchtitan/__init__.py", "torchtitan/components")),
    "musubi-tuner": Trainer(
        "https://github.com/kohya-ss/musubi-tuner", "30c658c4f4b0bf05038b3346eff9670259b10fc7",
        ("src/musubi_tuner/modules/attention.py", "src/musubi_tuner/wan/modules/attention.py",
         "src/musubi_tuner/hunyuan_model/attention.py"),
        "src"),
    "diffusion-pipe": Trainer(
        "https://github.com/tdrussell/diffusion-pipe", "8f83dbf25d03219df705570ec03e62be04bc402f",
        ("models/wan/attention.py", "models/cosmos_predict2_modeling.py",
         "models/llm_adapter.py")),
    "ai-toolkit": Trainer(
        "https://github.com/ostris/ai-toolkit", "27a03a91f23eb1b757d5ec2e80ee3e129cfcc350",
        ("extensions_built_in/diffusion_models/flux2/src/model.py",
         "extensions_built_in/diffusion_models/chroma/src/math.py",
         "toolkit/models/wan21/wan_attn.py")),
    "SimpleTuner": Trainer(
        "https://github.com/bghira/SimpleTuner", "bc8e6ab7738ce457a2ed8eb2d26cadd91c6442cb",
        ("simpletuner/helpers/training/attention_backend.py", "simpletuner/helpers/logging.py",
         "simpletuner/helpers/training/multi_process.py",
         "simpletuner/helpers/models/flux/attention.py")),
    "DiffSynth-Studio": Trainer(
        "https://github.com/modelscope/DiffSynth-Studio",
        "fed7b18fac2ed4cb802796eec91970e7659bccde",
        ("diffsynth/core/attention", "diffsynth/core/gradient", "diffsynth/models/wan_video_dit.py",
         "diffsynth/models/qwen_image_dit.py", "diffsynth/models/general_modules.py")),
}  # fmt: skip


def folder_of(name):
    return Path(os.environ.get(VARIABLE, "")) / name


class _Anything(type):
    """Classes with any attribute, each again such a class."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Anything(metaclass=_Anything):
    """Something of a package that is not installed. It can be derived from, and its instances can
    be called, such as for a decorator, and entered."""

    def __init__(self, *given, **more):
        pass

    def __call__(self, first=None, *given, **more):
        return first

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        return None

    def __getattr__(self, name):
        return Anything


class Finder:
    """Finds packages without what their __init__.py would import, those named in `bare`, and puts
    modules full of Anything in the place of those named in `missing`: packages that are not
    installed, and modules of the trainer, whose names have a dot."""

    def __init__(self, folder, bare=(), missing=()):
        self.folder, self.bare = Path(folder), set(bare)
        self.missing = {name for name in missing
                        if "." in name or importlib.util.find_spec(name) is None}  # fmt: skip

    def find_spec(self, name, path=None, target=None):
        if name in self.bare:
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(self.folder.joinpath(*name.split(".")))]
            return spec
        if any(name == one or name.startswith(f"{one}.") for one in self.missing):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__getattr__ = lambda name: getattr(Anything, name)


def without_asserts(module):
    """This gives the same module without its `assert`s. Some ask for a GPU, which on the simulator
    there is not."""
    path = Path(module.__file__)
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_unasserted", path)
    copy = importlib.util.module_from_spec(spec)
    exec(compile(path.read_text(), str(path), "exec", optimize=1), copy.__dict__)
    return copy
