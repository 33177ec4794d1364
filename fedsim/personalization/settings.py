"""Settings of personal models: the section `personalization:`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsim.core.limits import MAX_EXAMPLES, MAX_STEPS
from fedsim.core.settings import Probability, Settings


class _MethodSettings(Settings):
    holdout: Probability | None = Field(
        default=None,
        description="share of each client's examples that it never trains on, for the scores of "
        "global and personal model; null: none",
    )
    public_data: bool = Field(
        default=False,
        description="whether all examples are public, so that a simulation may compute and print "
        "scores of personal models; false: it makes none",
    )

    @model_validator(mode="after")
    def _scores_need_examples(self) -> Self:
        if self.public_data and self.holdout is None:
            raise ValueError(
                "public_data: true asks for scores, which need examples that no client trains on: "
                "set holdout, for example 0.2"
            )
        return self


class _DescentSettings(_MethodSettings):
    steps: int = Field(default=100, ge=1, le=MAX_STEPS, description="gradient steps")
    lr: float = Field(default=0.1, gt=0, description="learning rate")
    batch_size: Literal["full"] | Annotated[int, Field(ge=1, le=MAX_EXAMPLES)] = Field(
        default="full", description="examples of a step; full: all of the client's"
    )


class FineTuneSettings(_DescentSettings):
    """Gradient steps from the global model on the client's own examples."""

    method: Literal["fine_tune"] = Field(description="how a personal model is made")
    parameters: list[str] | None = Field(
        default=None,
        min_length=1,
        description="names of the parameters that change, with `*` for any text, such as "
        "`layers.2.*`; null: all that the federation trains",
    )


class DittoSettings(_DescentSettings):
    """Gradient steps that a penalty keeps near the global model (Li et al. 2021)."""

    method: Literal["ditto"] = Field(description="how a personal model is made")
    proximal_weight: float = Field(
        default=0.1,
        ge=0,
        description="λ of the penalty λ/2 · ‖personal − global‖²; 0: none",
    )


class LabelPriorSettings(_MethodSettings):
    """Logits shifted by the client's own share of each class; no gradient step."""

    method: Literal["label_prior"] = Field(description="how a personal model is made")
    smoothing: float = Field(
        default=1.0, gt=0, description="examples of each class that are added to the client's own"
    )
    global_prior: list[Annotated[float, Field(gt=0)]] | None = Field(
        default=None,
        min_length=2,
        description="public share of each class in the whole federation, in any unit; null: equal",
    )


PersonalizationSettings = Annotated[
    FineTuneSettings | DittoSettings | LabelPriorSettings, Field(discriminator="method")
]
