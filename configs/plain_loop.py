"""A plain PyTorch loop whose Hydra configuration records a window of its steps."""

import hydra
import torch
from omegaconf import DictConfig

from chakra_capture import capture


@hydra.main(version_base="1.3", config_path=".", config_name="plain_loop")
def main(config: DictConfig) -> None:
    """Train a small network on random data."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, config.hidden), torch.nn.ReLU(), torch.nn.Linear(config.hidden, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = torch.zeros(())
    with capture(config.chakra_profile) as session:
        for step in range(config.steps):
            with session.step(step):
                batch, target = torch.randn(16, 32), torch.randn(16, 1)
                with session.phase("forward"):
                    loss = torch.nn.functional.mse_loss(model(batch), target)
                with session.phase("backward"):
                    loss.backward()  # type: ignore[no-untyped-call]
                with session.phase("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
    print(f"loss {loss.item():.3f}, traces in {config.chakra_profile.trace_dir}")


if __name__ == "__main__":
    main()
