"""States of random generators as JSON, for `rank_extra`."""

from __future__ import annotations

import base64
import random

import torch


def rng_state() -> dict[str, str]:
    """Of torch's generators on this rank (the CPU's and that of each CUDA device) and Python's: pass it as
    `rank_extra`, or as a part of it."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    texts = {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}
    version, words, gauss = random.getstate()
    return {**texts, "python": f"{version} {','.join(map(str, words))} {gauss!r}"}


def set_rng_state(state: dict[str, str]) -> None:
    """What rng_state() returned, back into the generators; devices that aren't here are left out."""
    for name, text in state.items():
        if name == "python":
            version, words, gauss = text.split(" ")
            numbers = tuple(int(word) for word in words.split(","))
            random.setstate((int(version), numbers, None if gauss == "None" else float(gauss)))
            continue
        values = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if name == "cpu":
            torch.set_rng_state(values)
        elif torch.cuda.is_available() and int(name.split(":")[1]) < torch.cuda.device_count():
            torch.cuda.set_rng_state(values, name)
