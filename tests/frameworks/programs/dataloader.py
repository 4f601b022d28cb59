"""DataLoader workers under fork and spawn read a large tensor of the parent and return tensors, while it trains."""

from typing import Any

import torch
import torch.nn.functional as F
from program import begin, finish
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows of a tensor that the parent made, each with operators run on it in the worker."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = self.table[index]
        return row, torch.fft.rfft(row).abs()[: len(row) // 2].log1p()


def run(method: str | None, table: Tensor) -> dict[str, Any]:
    torch.manual_seed(4)
    loader = DataLoader(
        Rows(table),
        batch_size=256,
        shuffle=True,
        num_workers=2 if method else 0,
        multiprocessing_context=method,
        generator=torch.Generator().manual_seed(4),
    )
    model = nn.Sequential(nn.Linear(2048, 1024), nn.GELU(), nn.Linear(1024, 1024))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, sums = [], []
    for rows, spectra in loader:
        optimizer.zero_grad()
        loss = F.mse_loss(model(rows), spectra)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        sums.append(spectra.double().sum())
    return {"model": model.state_dict(), "losses": losses, "sums": sums}


def main() -> None:
    path = begin()
    table = torch.randn(1024, 2048).cumsum(dim=1) / 40
    results = {"none": run(None, table), "fork": run("fork", table), "spawn": run("spawn", table)}
    for method in ("fork", "spawn"):
        assert results[method]["losses"] == results["none"]["losses"], method
    finish(path, results | {"table": table})


if __name__ == "__main__":
    main()
