"""A generator and a critic trained against each other: two optimizers, two sequences of functions in turn."""

import torch
import torch.nn.functional as F
from program import begin, finish
from torch import nn


def generator_network() -> nn.Sequential:
    return nn.Sequential(
        nn.ConvTranspose2d(64, 64, 8),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(32, 3, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def critic_network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 32, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(32, 64, 4, stride=2, padding=1)),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 1),
    )


def main() -> None:
    path = begin()
    generator, critic = generator_network(), critic_network()
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    real = torch.randn(160, 3, 32, 32).tanh()
    ones, zeros = torch.ones(160, 1), torch.zeros(160, 1)
    losses = []
    for step in range(6):
        fake = generator(torch.randn(160, 64, 1, 1))
        # Two steps of the critic for each of the generator.
        critic_optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(critic(real), ones)
        loss = loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), zeros)
        loss.backward()
        critic_optimizer.step()
        losses.append(loss.item())
        if step % 2:
            generator_optimizer.zero_grad()
            loss = F.binary_cross_entropy_with_logits(critic(fake), ones)
            loss.backward()
            generator_optimizer.step()
            losses.append(loss.item())
    finish(path, {"generator": generator.state_dict(), "critic": critic.state_dict(), "losses": losses})


if __name__ == "__main__":
    main()
