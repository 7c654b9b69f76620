"""A data loader and sampler toolkit for reinforcement learning of language models."""
