"""DP-SGD in an ordinary torch training loop, without a federation: `PrivacyEngine`."""

from fedsim.clients.privacy_engine.engine import PrivacyEngine as PrivacyEngine
