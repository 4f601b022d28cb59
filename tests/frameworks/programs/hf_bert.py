"""A Hugging Face BERT from a small configuration, classifying padded sequences under an attention mask."""

import torch
from program import begin, finish, train
from transformers import BertConfig, BertForSequenceClassification


def main() -> None:
    path = begin()
    config = BertConfig(
        vocab_size=1024,
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=128,
        num_labels=4,
    )
    model = BertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(1024, (4, 12, 128))
    labels = torch.randint(4, (4, 12))
    mask = (torch.arange(128) < torch.randint(32, 129, (12, 1))).long()
    losses = train(
        model,
        optimizer,
        4,
        lambda step: model(input_ids=tokens[step], attention_mask=mask, labels=labels[step]).loss,
    )
    finish(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses})


if __name__ == "__main__":
    main()
