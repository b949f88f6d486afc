"""Addresses of sign-in, and of the tokens and tickets under `/api/v1/`."""

from __future__ import annotations

from django.urls import path, re_path

from monitor.hub_token_api import OwnHubToken
from monitor.signin import SignIn, SignInLink, SignOut
from monitor.token_api import TokenDetail, TokenList, WebSocketTicket

UUID = r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"

signin_patterns = [
    path("signin/", SignIn.as_view(), name="signin"),
    path("signin/link/", SignInLink.as_view(), name="signin-link"),
    path("signout/", SignOut.as_view(), name="signout"),
]
api_patterns = [
    re_path(r"^tokens/?$", TokenList.as_view(), name="tokens"),
    re_path(rf"^tokens/(?P<id>{UUID})/?$", TokenDetail.as_view(), name="token"),
    re_path(r"^hub-token/?$", OwnHubToken.as_view(), name="hub-token"),
    re_path(r"^ws-ticket/?$", WebSocketTicket.as_view(), name="ws-ticket"),
]
