"""Complex numbers: Fourier layers, complex parameters under Adam, conjugate and negative views, short-time spectra."""

import torch
from program import begin, finish
from torch import Tensor, nn


class Spectral(nn.Module):
    """(batch, channels, size, size) real to the same, mixing channels in the Fourier domain."""

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, modes, dtype=torch.complex64) / channels)
        self.local = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros_like(spectrum)
        low = spectrum[:, :, : self.modes, : self.modes]
        out[:, :, : self.modes, : self.modes] = torch.einsum("bixy,ioxy->boxy", low, self.weight)
        return torch.fft.irfft2(out, s=x.shape[-2:]) + torch.tanh(self.local(x))


class ComplexConvolution(nn.Module):
    """(batch, channels, length) complex to the same; the weights are a conjugate view when they are used."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, channels, 5, 2) / channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.conv1d(x, torch.view_as_complex(self.weight).conj(), padding=2)


def main() -> None:
    path = begin()
    model = nn.Sequential(Spectral(16, 12), Spectral(16, 12), Spectral(16, 12))
    second = ComplexConvolution(16)
    both = nn.ModuleList([model, second])
    optimizer = torch.optim.Adam(both.parameters(), lr=1e-3)
    x = torch.randn(3, 8, 16, 64, 64)
    signal = torch.randn(3, 8, 16, 4096, dtype=torch.complex64)

    def loss_of(step: int) -> Tensor:
        filtered = second(signal[step])
        energy = torch.view_as_real(filtered).square().mean() + filtered.conj().imag.abs().mean()
        return (model(x[step]) - x[step].flip(-1)).square().mean() + energy

    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    sound = torch.randn(4, 48_000)
    window = torch.hann_window(512)
    spectrum = torch.stft(sound, 512, window=window, return_complex=True)
    back = torch.istft(spectrum, 512, window=window, length=48_000)
    assert (back - sound).abs().max() < 1e-3
    results = {
        "model": both.state_dict(),
        "losses": losses,
        "spectrum": spectrum,
        "back": back,
        "adjoint": (signal[0, 0] @ signal[0, 0].mH).resolve_conj(),
        "negative": signal[0].conj().imag.clone(),
    }
    finish(path, results)


if __name__ == "__main__":
    main()
