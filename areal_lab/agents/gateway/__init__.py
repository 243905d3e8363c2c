"""The gateway: an inference API for unmodified agents, which records what it samples.

    agent -- OpenAI chat, OpenAI responses, Anthropic messages --> Call --> Conversation --> engines

Knows no tokens, templates or engines: those are behind `conversation.Conversation`. May import the
messages of `agents`; imported by its conversations, `hosting`, and the workflow `agent`.
"""
