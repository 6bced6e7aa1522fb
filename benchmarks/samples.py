"""What every strategy answers on every sample prompt: the table behind the samples' ``observed`` lines.

python benchmarks/samples.py [float32 bfloat16] > docs/samples.md
"""

from __future__ import annotations

import sys

import ccviz
from ccviz.prompts import Sample, load_sample, sample_names
from ccviz.tokens import encode_prompt


def answers(model: ccviz.LanguageModel, sample: Sample) -> list[tuple[str, ccviz.Trace]]:
    """Every strategy's trace on one sample, at the sample's own budgets."""
    frozen = encode_prompt(model.tokenizer, sample.text, system=sample.system).system_size
    return [
        (
            name,
            ccviz.generate(
                model,
                sample.text,
                strategy=name,
                cache_size=sample.cache_size,
                chunk_size=sample.chunk_size,
                frozen_size=frozen,
                max_new_tokens=sample.max_new_tokens,
                system=sample.system,
            ),
        )
        for name in ccviz.strategy_names()
    ]


def main(dtypes: list[str]) -> None:
    """Print the table as Markdown."""
    print("# What the built-in model answers on the samples\n")
    print("Made by `benchmarks/samples.py` on a CPU, greedy. ✓ right, ✗ wrong; each sample at its own budgets.")
    for dtype in dtypes:
        model = ccviz.load_model(dtype=dtype, device="cpu")
        print(f"\n## {dtype}")
        for name in sample_names():
            sample = load_sample(name)
            print(f"\n### {sample.title} (J = {sample.cache_size}, h = {sample.chunk_size}; right: {sample.answer})\n")
            print("| strategy | | answer |\n|---|---|---|")
            for strategy, trace in answers(model, sample):
                text = " ".join(trace.text.split()).replace("|", "\\|")
                shown = text if len(text) <= 160 else text[:160] + "…"
                print(f"| {strategy} | {'✓' if sample.is_right(trace.text) else '✗'} | {shown} |")


if __name__ == "__main__":
    main(sys.argv[1:] or ["float32", "bfloat16"])
