"""A Hugging Face T5 from a small configuration: encoder, decoder, cross attention, relative position biases."""

import torch
from program import begin, finish, train
from transformers import T5Config, T5ForConditionalGeneration


def main() -> None:
    path = begin()
    config = T5Config(
        vocab_size=1024, d_model=256, d_kv=64, d_ff=512, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    source = torch.randint(1024, (4, 8, 96))
    target = torch.randint(1024, (4, 8, 64))
    losses = train(model, optimizer, 4, lambda step: model(input_ids=source[step], labels=target[step]).loss)
    finish(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses})


if __name__ == "__main__":
    main()
