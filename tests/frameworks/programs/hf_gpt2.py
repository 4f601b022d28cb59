"""A Hugging Face GPT-2 from a small configuration: random weights, random seeded tokens, dropout on."""

import torch
from program import begin, finish, train
from transformers import GPT2Config, GPT2LMHeadModel


def main() -> None:
    path = begin()
    model = GPT2LMHeadModel(GPT2Config(vocab_size=1024, n_positions=128, n_embd=256, n_layer=3, n_head=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(1024, (4, 12, 128))
    losses = train(model, optimizer, 4, lambda step: model(input_ids=tokens[step], labels=tokens[step]).loss)
    finish(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses})


if __name__ == "__main__":
    main()
