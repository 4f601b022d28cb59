"""Programs whose iterations are found, and planned, although nobody says where they end or when their data arrive."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import Ended, run_source

# Batches arrive early and late: a worker that waits lets the other's come first.
TRAINER = """
    import sys, tempfile, time
    import torch
    from torch.utils.data import Dataset, get_worker_info
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    class Tokens(Dataset):
        tokens = torch.randint(512, (48, 64), generator=torch.Generator().manual_seed(0))

        def __len__(self):
            return len(self.tokens)

        def __getitem__(self, index):
            time.sleep(0.02 * (index % 3) * get_worker_info().id)
            return {"input_ids": self.tokens[index], "labels": self.tokens[index]}

    def main():
        config = GPT2Config(vocab_size=512, n_positions=64, n_embd=128, n_layer=3, n_head=4)
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config)
        arguments = TrainingArguments(
            tempfile.mkdtemp(), per_device_train_batch_size=4, max_steps=20, dataloader_num_workers=2,
            dataloader_persistent_workers=True, report_to=[], save_strategy="no", logging_strategy="no",
            disable_tqdm=True, use_cpu=True,
        )
        loss = Trainer(model, arguments, train_dataset=Tokens()).train().training_loss
        print(loss, [parameter.double().sum().item() for parameter in model.parameters()])

    main()
"""

SERVING = """
    import http.server, random, threading, urllib.request
    from concurrent.futures import ThreadPoolExecutor
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(layer for _ in range(10) for layer in (torch.nn.Linear(256, 256), torch.nn.GELU())))
    order = list(range(40))
    random.Random(1).shuffle(order)

    def handle(request):
        with torch.no_grad():
            probabilities = model(torch.full((16, 256), request / 50)).softmax(-1)
            return probabilities.double().sum().item() + probabilities.max().item()

    def pool(threads):
        with ThreadPoolExecutor(threads) as executor:
            return dict(zip(order, executor.map(handle, order)))

    def server():
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                answer = repr(handle(int(self.path[1:]))).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_):
                pass

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            address = f"http://127.0.0.1:{server.server_port}/"
            answers = {request: urllib.request.urlopen(address + str(request)).read() for request in order}
            server.shutdown()
        return answers

    print(sorted(WAY.items()))
"""

LOOPS = """
    import torch

    torch.manual_seed(0)
    weights = [torch.randn(256, 256) / 16 for _ in range(6)]
    x = torch.randn(25, 16, 256)

    def modules():  # parameters are updated by hand, and there is no optimizer
        layers = [layer for _ in range(6) for layer in (torch.nn.Linear(256, 256), torch.nn.GELU())]
        model = torch.nn.Sequential(*layers)
        for step in range(30):
            loss = model(x[0]).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        print(loss.item(), [parameter.double().sum().item() for parameter in model.parameters()])

    def functions():  # no module either, and new parameters in each step
        parameters = weights
        for step in range(30):
            parameters = [parameter.requires_grad_() for parameter in parameters]
            hidden = x[0]
            for parameter in parameters:
                hidden = torch.tanh(hidden @ parameter)
            loss = hidden.square().mean()
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                parameters = [parameter - 0.1 * gradient for parameter, gradient in zip(parameters, gradients)]
        print(loss.item(), [parameter.double().sum().item() for parameter in parameters])

    def inference():
        results = []
        for step in range(30):
            hidden = torch.full((16, 256), step / 30)
            for weight in weights * 2:
                hidden = torch.tanh(hidden @ weight)
            results.append(hidden.double().sum().item())
        print(results)

    def recurrence():  # within each step there is a loop over the same weights
        u, w = (weight.requires_grad_() for weight in weights[:2])
        for step in range(30):
            hidden = torch.zeros(16, 256)
            for t in range(25):
                hidden = torch.tanh(hidden @ w + x[t] @ u)
            hidden.square().mean().backward()
            with torch.no_grad():
                for parameter in (u, w):
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
        print(u.double().sum().item(), w.double().sum().item())

    LOOP()
"""


def as_in_plain_memory(folder: Path, source: str, budget: str, **variables: str) -> Ended:
    ours = run_source(folder, source, OOC_BUDGET=budget, OOC_SMALL_LIMIT="16KiB", **variables).check()
    plain = folder / "plain"
    plain.mkdir()
    in_core = run_source(plain, source, OOC_ALLOC="off").check()
    assert ours.output.splitlines()[-1] == in_core.output.splitlines()[-1]  # those before tell times
    assert ours.figures["swap_out_bytes"] + ours.figures["clean_drop_bytes"] > 0
    return ours


@pytest.mark.slow
def test_a_trainer_whose_workers_deliver_early_and_late_is_planned(tmp_path: Path) -> None:
    """What a batch's arrival takes is no part of the sequence, which else differs from step to step.

    Beside other work dropping may pay, and the first iteration that drops something is another sequence.
    """
    figures = as_in_plain_memory(tmp_path, TRAINER, "9700000", OOC_RECOMPUTE="off").figures
    assert figures["steps"] == 20 and figures["oversubscription"] > 2.4
    assert figures["planned_iteration_count"] == 18 and figures["no_plan_reason"] is None


@pytest.mark.parametrize("way", ["pool(1)", "server()"])
def test_requests_in_threads_one_after_the_other_are_planned(way: str, tmp_path: Path) -> None:
    figures = as_in_plain_memory(tmp_path, SERVING.replace("WAY", way), "1700000").figures
    assert figures["steps"] >= 36 and figures["planned_iteration_count"] >= 30
    assert figures["no_plan_reason"] is None


def test_requests_side_by_side_are_counted_and_explained(tmp_path: Path) -> None:
    figures = as_in_plain_memory(tmp_path, SERVING.replace("WAY", "pool(4)"), "1700000").figures
    assert 2 <= figures["steps"] < 40
    bare = figures["steps"] - figures["planned_iteration_count"]
    assert bare <= max(2, figures["planned_iteration_count"]) or "side by side" in figures["no_plan_reason"]


@pytest.mark.parametrize(
    ("loop", "budget"),
    [("modules", "1600000"), ("functions", "1600000"), ("inference", "1000000"), ("recurrence", "1600000")],
)
@pytest.mark.medium
def test_a_loop_without_an_optimizer_is_found_by_what_repeats(loop: str, budget: str, tmp_path: Path) -> None:
    figures = as_in_plain_memory(tmp_path, LOOPS.replace("LOOP", loop), budget, OOC_RECOMPUTE="off").figures
    assert 24 <= figures["steps"] <= 30  # the first ones are taken to be the first iteration
    if loop == "recurrence":  # at first the loop within a step is taken for the program's
        assert figures["planned_iteration_count"] >= 20
    else:
        assert figures["planned_iteration_count"] >= figures["steps"] - 3
        assert figures["no_plan_reason"] is None and figures["divergence_count"] == 0


@pytest.mark.medium
def test_a_loop_is_found_while_functions_run_again_in_it(tmp_path: Path) -> None:
    """Over a link so slow that dropping pays on any machine."""
    source = LOOPS.replace("LOOP", "modules")
    figures = as_in_plain_memory(tmp_path, source, "1600000", OOC_EMULATED_BANDWIDTH="30MB/s").figures
    assert 24 <= figures["steps"] <= 30
    assert figures["recompute_drop_count"] > 0 and figures["recompute_function_count"] > 0


@pytest.mark.medium
def test_calls_are_kept_where_there_is_no_room_for_copies_of_their_arguments(tmp_path: Path) -> None:
    """The budget is used up by larger ones, and rows of 16 KiB, which count as small, are allocated like those."""
    source = LOOPS.replace("LOOP", "recurrence").replace("range(30)", "range(8)")
    as_in_plain_memory(tmp_path, source, "1600000", _OOC_RECOMPUTE_EVERYTHING="1")
