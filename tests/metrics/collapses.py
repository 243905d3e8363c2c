"""Mean |w - 1| before published collapses: two recorded series, and what is known of the others.

Source: okoge-kaz/miles, experiments/outputs/reasoning_eval/wandb-collapse-20260901 (commit
16119848, read 2026-11-28): Qwen3-4B, DAPO-Math, GRPO with token TIS in [0, 2], responses of 16,384
tokens, one seed each. The series are `train/tis_abs` of each update, read off the raw lines of
figures/tis-collapse-time-alignment-t1r7-maxlen16384.svg (0.5 % of their value); their first
5-update mean of 0.05 is at the update of the table in tis-analysis.md. `PUBLISHED` and `STABLE` are
that table: no series are at hand for them.
"""

from __future__ import annotations

from typing import NamedTuple


class Collapse(NamedTuple):
    """A run that collapsed, in updates from 1."""

    reaches: int
    """First 5-update mean of |w - 1| of 0.05 and more."""
    collapses: int
    """First 5-update mean reward below 0.30."""
    window: float
    """Mean |w - 1| of the 20 updates before the collapse."""


PUBLISHED = {
    "zero reward, lag 16": Collapse(237, 259, 0.148),
    "zero reward, lag 20": Collapse(119, 147, 0.278),
    "zero reward, lag 24": Collapse(233, 274, 0.875),
    "zero reward, lag 28": Collapse(135, 169, 0.433),
}
"""Responses that are cut off get the reward 0."""
STABLE = {
    "zero reward, lag 12": 0.017,
    "scored, lag 8": 0.015,
    "no loss on cut responses, lag 16": 0.017,
    "no loss on cut responses, lag 20": 0.019,
    "weight by age, lag 20": 0.023,
}
"""Mean |w - 1| of the last 20 of up to 300 updates of runs that did not collapse."""

_SCORED = """
118 119 118 122 118 122 124 125 122 126 121 134 132 130 140 133 137 140 138 133 142 137 142
141 143 141 151 149 158 151 159 161 166 165 165 173 159 164 176 178 180 182 185 188 194 193
200 200 213 207 208 213 217 214 226 224 231 237 237 238 241 236 233 225 221 229 228 239 235
231 236 226 231 226 232 233 231 235 230 232 219 219 216 212 213 215 212 213 220 214 215 219
218 226 241 240 244 245 255 262 260 271 285 276 296 297 305 318 315 332 324 342 347 357 365
365 376 404 392 407 419 474 518 523 582 635 683 800 837 900 1030 1012 1285 1310 1608 1706
1753 2060 2069 2546 2361 5096 2472 2273 2242 2196 2172 2223 2536 2153
"""
_ZERO_REWARD = """
154 152 148 151 151 156 160 166 156 164 168 164 166 168 173 183 178 178 183 187 180 185 186
191 194 193 202 195 180 190 195 196 198 198 204 202 197 203 201 197 190 194 197 192 191 193
191 182 183 185 182 185 185 180 187 187 184 177 188 188 197 202 210 197 198 205 211 208 199
216 200 205 201 206 197 204 187 202 202 196 185 189 186 183 186 188 189 179 186 185 190 185
191 196 189 196 195 206 201 210 216 214 224 222 229 229 223 234 227 226 220 224 222 216 209
216 202 209 208 201 205 201 196 203 201 202 199 208 203 197 203 202 198 201 200 198 191 200
191 189 197 184 189 190 180 193 197 184 196 204 206 197 212 223 221 234 232 231 226 227 227
236 240 233 230 229 240 227 238 227 237 240 236 244 238 229 246 232 245 255 243 236 243 239
248 243 236 258 229 257 263 275 285 288 316 317 352 372 431 441 488 536 593 683 735 863 980
1085 1222 1391 1434 1493 1608 1833 2226 1893 1581 1723 1524 1598 1260 1290 1329 1260 1387
1411
"""


def _series(text: str) -> list[float]:
    return [float(one) * 1e-4 for one in text.split()]


RECORDED = {
    "scored, lag 16": (1, Collapse(125, 150, 0.211), _series(_SCORED)),
    "zero reward, lag 16": (34, PUBLISHED["zero reward, lag 16"], _series(_ZERO_REWARD)),
}
"""First update of the series, what is known of the run, and |w - 1| until the reward collapsed."""
