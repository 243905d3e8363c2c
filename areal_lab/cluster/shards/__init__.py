"""The data plane: tensors go from host to host over HTTP, and only their metadata elsewhere.

May import `data.arrays` and `engines.keys`; imported by the host agents and by what trains. Only
`torch_view` loads torch.
"""
