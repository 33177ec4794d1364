"""Settings of personal models, the section `personalization` of an experiment."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsim.core.limits import MAX_EXAMPLES, MAX_STEPS
from fedsim.core.settings import Probability, Settings


class _MethodSettings(Settings):
    holdout: Probability | None = Field(
        default=None,
        description="share of each client's examples that it holds out of training, for the scores "
        "of global and personal model; null holds out none",
    )
    public_data: bool = Field(
        default=False,
        description="whether all examples are public, so that a simulation may compute and print "
        "scores of personal models; false: no personal models are made",
    )

    @model_validator(mode="after")
    def _scores_need_examples(self) -> Self:
        if self.public_data and self.holdout is None:
            raise ValueError(
                "public_data: true computes scores, which need examples held out of training: "
                "set holdout, for example 0.2"
            )
        return self


class _DescentSettings(_MethodSettings):
    steps: int = Field(default=100, ge=1, le=MAX_STEPS, description="number of gradient steps")
    lr: float = Field(default=0.1, gt=0, description="learning rate")
    batch_size: Literal["full"] | Annotated[int, Field(ge=1, le=MAX_EXAMPLES)] = Field(
        default="full", description="number of examples of a step; full: all examples of the client"
    )


class FineTuneSettings(_DescentSettings):
    """Settings of fine_tune: gradient steps from the global model on the client's examples."""

    method: Literal["fine_tune"] = Field(description="the method that makes personal models")
    parameters: list[str] | None = Field(
        default=None,
        min_length=1,
        description="names of the parameters that change, with `*` for any text, such as "
        "`layers.2.*`; null: all parameters that the federation trains",
    )


class DittoSettings(_DescentSettings):
    """Settings of ditto: gradient steps with a penalty on the distance to the global model."""

    method: Literal["ditto"] = Field(description="the method that makes personal models")
    proximal_weight: float = Field(
        default=0.1,
        ge=0,
        description="λ of the penalty λ/2 · ‖personal − global‖²; 0: no penalty",
    )


class LabelPriorSettings(_MethodSettings):
    """Settings of label_prior: logits shifted by the client's share of each class, no training."""

    method: Literal["label_prior"] = Field(description="the method that makes personal models")
    smoothing: float = Field(
        default=1.0,
        gt=0,
        description="number added to the client's count of examples of each class",
    )
    global_prior: list[Annotated[float, Field(gt=0)]] | None = Field(
        default=None,
        min_length=2,
        description="public share of each class in the whole federation, in any unit; null: equal "
        "shares",
    )


PersonalizationSettings = Annotated[
    FineTuneSettings | DittoSettings | LabelPriorSettings, Field(discriminator="method")
]
