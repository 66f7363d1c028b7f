"""Numbers as functions of sizes."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations_with_replacement

Sizes = tuple[int, ...]


class Fit:
    """Functions of sizes, fitted to the numbers at some points.

    Sizes that are equal at all points are one symbol. The first form that is right at all points is taken: a product of
    symbols, times a fraction, plus a constant; a symbol divided by a small number and rounded down; one divided by a
    symbol. With a single point only products are tried; a number that is no product is taken for constant. The last
    ``alone`` sizes are numbers that a call was given. They are in no product with others.
    """

    def __init__(self, points: Sequence[Sizes], now: Sizes, alone: int = 0) -> None:
        every = list(zip(*points, now, strict=True))
        sizes = len(dict.fromkeys(every[: len(now) - alone]))
        columns = dict.fromkeys(every)
        self.now = [c[-1] for c in columns]
        self.seen = [c[:-1] for c in columns]
        moving = [k for k, c in enumerate(columns) if len(set(c)) > 1]
        self.products: list[tuple[int, ...]] = [(k,) for k in moving]
        pairs = combinations_with_replacement(range(sizes), 2)
        self.products += [p for p in pairs if set(p) & set(moving) and min(self.now[k] for k in p) > 1]
        self.new = [p for p in self.products if all(len(set(self.seen[k])) == 1 for k in p)]
        self._found: dict[tuple[int | float, ...], int | float | None] = {}

    def __call__(self, number: tuple[int | float, ...]) -> int | float | None:
        """The number for the present sizes, from those at the points; None if no form fits."""
        if number not in self._found:
            self._found[number] = self._fitted(number)
        return self._found[number]

    def _fitted(self, number: tuple[int | float, ...]) -> int | float | None:
        if len(set(number)) == 1:
            same = (p for p in self.new if type(number[0]) is int and self._at(p)[0] == number[0])
            product = next(same, None)
            return number[0] if product is None else self._value(product)
        if any(type(x) is float for x in number):
            return self._inverse(number)
        whole = [int(x) for x in number]
        return next((x for p in self.products for x in (self._affine(p, whole),) if x is not None), None)

    def _at(self, product: tuple[int, ...]) -> list[int]:
        """The product of sizes at each point."""
        products = [1] * len(self.seen[0])
        for k in product:
            products = [a * b for a, b in zip(products, self.seen[k], strict=True)]
        return products

    def _value(self, product: tuple[int, ...]) -> int:
        """The product of the present sizes."""
        product_now = 1
        for k in product:
            product_now *= self.now[k]
        return product_now

    def _affine(self, product: tuple[int, ...], number: list[int]) -> int | None:
        at = self._at(product)
        low, high = at.index(min(at)), at.index(max(at))
        if at[low] == at[high]:
            return None
        slope = Fraction(number[high] - number[low], at[high] - at[low])
        rest = number[low] - slope * at[low]
        if all(slope * x + rest == y for x, y in zip(at, number, strict=True)):
            result = slope * self._value(product) + rest
            if result.denominator == 1:
                return int(result)
        for divisor in (2, 4, 8, 16, 32) if len(product) == 1 else ():
            for added in range(divisor):
                less = number[0] - (at[0] + added) // divisor
                if all((x + added) // divisor + less == y for x, y in zip(at, number, strict=True)):
                    return (self._value(product) + added) // divisor + less
        return None

    def _inverse(self, number: tuple[int | float, ...]) -> float | None:
        for product in self.products:
            at, now = self._at(product), self._value(product)
            for function in (lambda x: 1.0 / x, lambda x: x**-0.5, float, lambda x: x**0.5):
                if all(x and function(x) == y for x, y in zip(at, number, strict=True)):
                    return function(now)
        return None
