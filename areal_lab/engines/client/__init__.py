"""The client of a running inference server, over HTTP.

May import `engines.protocol`, `engines.weights.verify_folder`, data, models and
control; imported by the other rooms of `engines` and by `pipeline`.
"""
