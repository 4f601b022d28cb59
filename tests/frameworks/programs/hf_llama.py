"""A Hugging Face Llama from a small configuration: rotary positions, RMS norm, grouped key and value heads."""

import torch
from program import begin, finish, train
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    path = begin()
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(1024, (4, 8, 128))
    losses = train(model, optimizer, 4, lambda step: model(input_ids=tokens[step], labels=tokens[step]).loss)
    finish(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses})


if __name__ == "__main__":
    main()
