"""Trains in several processes, in each way, and once more from a checkpoint. torchrun starts it:
training_ranks.py FOLDER WORD...; the words are for `experiments.train`."""

import sys

import torch

from experiments import train

folder, *given = sys.argv[1:]
torch.distributed.init_process_group("gloo")  # once: a second one may wait for ever
for how in ("ddp", "fsdp"):
    words = [*given, "--parallel", how]
    place = f"{folder}/{how}"
    assert train.main([*words, "--out", place, "--save", place + "/{step}.pt",
                       "--save-every", "5"]) == 0  # fmt: skip
    assert train.main([*words, "--out", f"{place}-resumed", "--resume", f"{place}/5.pt"]) == 0
torch.distributed.destroy_process_group()
