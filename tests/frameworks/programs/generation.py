"""Hugging Face generation with a key and value cache that grows by one position a step: greedy, and with beams."""

import torch
from program import begin, finish
from transformers import GPT2Config, GPT2LMHeadModel


def main() -> None:
    path = begin()
    config = GPT2Config(
        vocab_size=1024, n_positions=256, n_embd=256, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=None
    )
    model = GPT2LMHeadModel(config).eval()
    prompt = torch.randint(1, 1024, (12, 48))
    common = {"attention_mask": torch.ones_like(prompt), "pad_token_id": 0}
    greedy = model.generate(prompt, max_new_tokens=24, do_sample=False, **common)
    beams = model.generate(prompt[:4], max_new_tokens=8, num_beams=3, pad_token_id=0, attention_mask=prompt[:4] > 0)
    assert greedy.shape == (12, 72)
    with torch.no_grad():
        out = model(greedy, use_cache=True)
    finish(path, {"greedy": greedy, "beams": beams, "logits": out.logits[:, -8:], "model": model.state_dict()})


if __name__ == "__main__":
    main()
