"""The overlap scheduler, in the order of a step: requests, input batch, model runner, output."""
