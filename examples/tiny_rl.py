"""What ``grpo_text.py`` trains: three tasks over single characters, and a tiny causal language model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

EOS, LETTERS, DIGITS = ".", "abcd", "01234"
VOCAB = EOS + " " + LETTERS + DIGITS + "?>+="
PROMPT_WIDTH = 6  # prompts are justified to one width: sampling then needs no padding and no attention mask
LIMITS = {"symbol": 4, "copy": 32, "add": 96}  # tokens of the longest response; an untrained policy often gets there
RAMBLE = 24  # so many tokens after the answer of a sum cost nothing but time


def encode(text: str) -> list[int]:
    return [VOCAB.index(character) for character in text]


def decode(ids: Sequence[int]) -> str:
    return "".join(VOCAB[i] for i in ids)


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt: ``?b=`` asks for the symbol b, ``>dab=`` for a copy, ``1+2=`` for the sum."""

    source: str
    prompt: str
    answer: str

    @classmethod
    def draw(cls, source: str, rng: random.Random) -> Problem:
        if source == "symbol":
            answer = rng.choice(LETTERS)
            prompt = f"?{answer}="
        elif source == "copy":
            answer = "".join(rng.choices(LETTERS, k=3))
            prompt = f">{answer}="
        else:
            a, b = rng.randrange(3), rng.randrange(3)
            prompt, answer = f"{a}+{b}=", str(a + b)
        return cls(source, prompt.rjust(PROMPT_WIDTH), answer)

    def reward(self, response: str) -> float:
        """Between 0 and 1: per position 1 for the right character and 0.2 for another one of its kind.

        >>> Problem("copy", " >dab=", "dab").reward("dac.")
        0.7333333333333334
        """
        text = response.split(EOS)[0]
        surplus = len(text) - len(self.answer)
        kind = DIGITS if self.source == "add" else LETTERS
        pairs = zip(text, self.answer, strict=False)
        credit = sum(1.0 if got == want else 0.2 if got in kind else 0.0 for got, want in pairs)
        if self.source == "add":
            return credit * (1 - max(0, surplus - RAMBLE) / LIMITS["add"])
        return credit / (len(self.answer) + max(0, surplus))


def build_model(seed: int, layers: int = 2) -> LlamaForCausalLM:
    """A Llama of 84,160 parameters, of 43,072 with one layer, randomly initialised: the same on every process that asks
    with the same seed."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(VOCAB),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        initializer_range=0.1,  # about 1/sqrt(hidden_size): with the usual 0.02 so small a model learns twice as slowly
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)
