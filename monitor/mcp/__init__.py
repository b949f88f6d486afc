"""miStudio for agents: a Model Context Protocol server whose tools are the REST views, under the caller's rights.

caller      who calls, and with which scopes
arguments   what the tools take, as DRF serializers
reading     a piece of a file as text, which REST streams whole
tools       every tool: one per kind, one per verb, and the ones that look
calls       one call: rights, arguments, the view, the answer, the audit row
waiting     `wait_for_job`
threads     where the synchronous part runs
server      the SDK's server for one caller
http        the door at `/mcp`: host, origin, token
transport   behind it: the SDK's streamable HTTP for one request
contract    all tools as a file (`docs/mcp-tools.json`)

Only `server` and `transport` import the SDK: it takes 0.6 s and 27 MiB, which a web process that no agent calls does
without.
"""
