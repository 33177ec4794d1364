"""Cryptography of secure aggregation, by which the server learns only the sum of the updates.

- `settings`: the section `secure_aggregation` of an experiment file.
- `encoding`, `metrics`, `payload`, `digests`: an update as a vector over the ring Z_2^b.
- `additive`, `hpke`, `identity`: secret shares for several aggregators.
- `shamir`, `graph`, `masks`: masks for a single server.
- `context`, `messages`, `fields`, `wire`: the protocol's messages, the rules of their fields, and
  their wire format.

The code of server, helpers and clients is in `fedsim.server.secure` and `fedsim.clients.secure`. No
module here imports Flower or torch.
"""
