"""`onnxgc export`: trained weights back into the forward model."""

from typing import Annotated

from typer import Argument

from onnxgc.cli.arguments import check_target
from onnxgc.model.files.load import check_model_file, model_files
from onnxgc.training.deployment import export_state


def export_command(
    model: Annotated[str, Argument(help="Forward model that the training file was made from.")],
    state: Annotated[str, Argument(help="State file (.safetensors), as a program or `train` left it.")],
    output: Annotated[str, Argument(help="Model to write.")],
) -> None:
    """Write the weights of a state into the forward model."""
    check_model_file(model)
    check_target("OUTPUT", output, *model_files(model), state)
    export_state(model, state, output)
    print(f"wrote {output}")
