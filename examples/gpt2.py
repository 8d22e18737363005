"""Train a small GPT-2 with torch's softmax and with ndsoftmax under it: same losses, both times.

    pip install transformers
    python examples/gpt2.py

The model is Hugging Face's own, with random weights and eager attention; nothing in it is changed.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time

import ndsoftmax
import torch
from transformers import GPT2Config, GPT2LMHeadModel


def train(device: str, steps: int, context: int) -> tuple[list[float], float]:
    """Return the loss of every step, and the seconds a step took, the median of those after the first."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=1000,
        n_positions=context,
        n_embd=128,
        n_layer=2,
        n_head=4,
        attn_implementation="eager",
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(config.vocab_size, (4, context), device=device)
    losses, seconds = [], []
    for _ in range(steps):
        start = time.perf_counter()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        seconds.append(time.perf_counter() - start)
    return losses, statistics.median(seconds[1:] or seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--context", type=int, default=256)
    options = parser.parse_args()

    results = {}
    for name, block in (("torch", contextlib.nullcontext), ("ndsoftmax", ndsoftmax.enable)):
        with block():
            results[name] = train(options.device, options.steps, options.context)

    print(f"{'step':8}", *(f"{name:>10}" for name in results))
    for step, losses in enumerate(zip(*(losses for losses, _ in results.values()), strict=True)):
        print(f"{step:<8}", *(f"{loss:10.6f}" for loss in losses))
    print("ms/step ", *(f"{1e3 * seconds:10.2f}" for _, seconds in results.values()))
    torchs, ours = (torch.tensor(losses) for losses, _ in results.values())
    torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=0)


if __name__ == "__main__":
    main()
