"""Controllers for people who write their own training loop on several hosts.

rollouts.prepare_batch() --metadata--> trainer.train(batch) --weights--> rollouts.update_weights()
tensors: from the hosts that generate, through this process, to the first host that trains
"""
