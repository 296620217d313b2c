"""The pictures of the methods, as SVG: clients are circles, models are squares, the colour is the true cluster."""

import math
from collections.abc import Callable, Sequence

from jfcl.plots import PALETTE

BLUE, ORANGE, GREEN, RED = PALETTE[:4]
GREY, INK = "#999999", "#333333"
HIDDEN = (BLUE, ORANGE, BLUE, ORANGE, ORANGE, BLUE)  # the true clusters of six clients
WIDTH, HEIGHT = 640, 214


class Picture(list):
    """Elements of an SVG; `text()` returns the file."""

    def client(self, x: float, y: float, color: str, *, hostile: bool = False) -> None:
        self.append(f'<circle cx="{x}" cy="{y}" r="11" fill="{color}"/>')
        if hostile:
            self.append(f'<path d="M{x - 5} {y - 5}l10 10m0 -10l-10 10" stroke="white" stroke-width="3"/>')

    def model(self, x: float, y: float, color: str, size: float = 30) -> None:
        corner = f'x="{x - size / 2}" y="{y - size / 2}" width="{size}" height="{size}"'
        self.append(f'<rect {corner} rx="4" fill="{color}"/>')

    def line(self, x: float, y: float, u: float, v: float, color: str = INK, width: float = 2, dash: str = "") -> None:
        self.append(f'<path d="M{x} {y}L{u} {v}" stroke="{color}" stroke-width="{width}" stroke-dasharray="{dash}"/>')

    def arrow(self, x: float, y: float, u: float, v: float, color: str = INK, width: float = 2, dash: str = "") -> None:
        self.line(x, y, u, v, color, width, dash)
        angle = math.atan2(v - y, u - x)
        ends = [(u - 9 * math.cos(angle + s), v - 9 * math.sin(angle + s)) for s in (0.45, -0.45)]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in [(u, v), *ends])
        self.append(f'<polygon points="{points}" fill="{color}"/>')

    def ring(self, x: float, y: float, radius: float, color: str = INK, dash: str = "5 4") -> None:
        about = f'fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="{dash}"'
        self.append(f'<circle cx="{x}" cy="{y}" r="{radius}" {about}/>')

    def box(self, x: float, y: float, width: float, height: float, color: str = GREY) -> None:
        about = f'fill="none" stroke="{color}" stroke-width="2" stroke-dasharray="5 4"'
        self.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="14" {about}/>')

    def say(self, x: float, y: float, words: str, *, anchor: str = "middle", color: str = INK) -> None:
        self.append(f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{color}">{words}</text>')

    def text(self, about: str) -> str:
        style = 'font-family="sans-serif" font-size="14"'
        size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {style}>'
        return "\n".join([head, f"<title>{about}</title>", *self, "</svg>\n"])


def clients(p: Picture, y: float = 165, left: float = 120, step: float = 80, colors: Sequence[str] = HIDDEN) -> list:
    """Draws a row of clients and returns their places."""
    places = [(left + step * i, y) for i in range(len(colors))]
    for (x, y), color in zip(places, colors, strict=True):
        p.client(x, y, color)
    return places


def clusters(p: Picture, left: float) -> None:
    """Draws two rows of clients, each with the model of its cluster."""
    for y, color in ((95, BLUE), (155, ORANGE)):
        clients(p, y, left, 26, [color] * 3)
        p.arrow(left + 72, y, left + 102, y, color)
        p.model(left + 122, y, color)


def fedavg(p: Picture) -> None:
    p.model(320, 45, GREY)
    for (x, y), color in zip(clients(p), HIDDEN, strict=True):
        p.arrow(320 + (x - 320) * 0.12, 66, x, y - 16, color)
    p.say(350, 40, "one model for all:", anchor="start")
    p.say(350, 58, "the mean of the clients' models", anchor="start")
    p.say(320, 200, "clients of two hidden clusters")


def local(p: Picture) -> None:
    for (x, y), color in zip(clients(p), HIDDEN, strict=True):
        p.model(x, y - 70, color)
        p.line(x, y - 52, x, y - 16, color)
    p.say(320, 50, "a model for each client; nothing is sent")


def oracle(p: Picture) -> None:
    at = {BLUE: 220, ORANGE: 420}
    for color, x in at.items():
        p.model(x, 45, color)
    for (x, y), color in zip(clients(p), HIDDEN, strict=True):
        p.arrow(at[color], 66, x, y - 16, color)
    p.say(320, 50, "the clusters")
    p.say(320, 68, "are given")


def ifca(p: Picture) -> None:
    at = {BLUE: 220, ORANGE: 420}
    for color, x in at.items():
        p.model(x, 45, color)
    for (x, y), color in zip(clients(p), HIDDEN, strict=True):
        for other, u in at.items():
            if other == color:
                p.arrow(u, 66, x, y - 16, color, 3)
            else:
                p.line(u, 66, x, y - 16, GREY, 1, "3 4")
    p.say(320, 200, "each client compares all models and trains the one of lowest loss")


def hypcluster(p: Picture) -> None:
    ifca(p)
    p.pop()
    p.say(320, 200, "as IFCA; clients weigh by their number of examples")


def clove(p: Picture) -> None:
    heights = {BLUE: (42, 16, 30), ORANGE: (14, 40, 34)}
    for (x, y), color in zip(clients(p, 165, 90, 52), HIDDEN, strict=True):
        for i, height in enumerate(heights[color]):
            shift = (x + 3 * i) % 5
            at, size = f'x="{x - 17 + 12 * i}" y="{y - 22 - height - shift}"', f'width="9" height="{height + shift}"'
            p.append(f'<rect {at} {size} fill="{GREY}"/>')
    p.say(220, 45, "1. each client's losses under all models")
    p.arrow(385, 125, 430, 125)
    clusters(p, 470)
    p.say(535, 45, "2. cluster the vectors,")
    p.say(535, 65, "3. a model for each")
    p.say(320, 203, "alike in all losses, not only in the lowest one")


def cfl_gp(p: Picture) -> None:
    for x, turns in ((70, (-1.35, -0.2)), (205, (-0.3, -1.5))):
        p.model(x, 135, GREY)
        for color, turn in zip((BLUE, BLUE, ORANGE), (turns[0], turns[0] + 0.25, turns[1]), strict=True):
            u, v = math.cos(turn), math.sin(turn)
            p.arrow(x + 20 * u, 135 + 20 * v, x + 75 * u, 135 + 75 * v, color)
    p.say(160, 32, "1. gradients at each model in turn,")
    p.say(160, 50, "and their means over rounds")
    p.arrow(320, 125, 365, 125)
    clusters(p, 415)
    p.say(475, 32, "2. singular vectors and k-means")
    p.say(475, 50, "of all means of a client")
    p.say(320, 203, "clusters keep their numbers from round to round")


def cfl(p: Picture) -> None:
    p.box(20, 70, 150, 90)
    for (x, y), color in zip([(50, 100), (95, 95), (140, 105), (60, 135), (105, 138), (145, 135)], HIDDEN, strict=True):
        p.client(x, y, color)
    p.say(95, 55, "one cluster")
    for (x, y), color in zip([(60, -8), (52, 25), (64, 18)], [BLUE] * 3, strict=True):
        p.arrow(275, 115, 275 + x, 115 + y, color)
    for (x, y), color in zip([(-55, -20), (-62, 4), (-50, 22)], [ORANGE] * 3, strict=True):
        p.arrow(275, 115, 275 + x, 115 + y, color)
    p.say(275, 55, "updates that disagree:")
    p.say(275, 185, "their mean is short, they are long")
    for y, color in ((60, BLUE), (145, ORANGE)):
        p.arrow(375, 110, 440, y + 10, INK)
        p.box(455, y - 20, 150, 60, color)
        for i in range(3):
            p.client(490 + 40 * i, y + 10, color)
    p.say(530, 30, "split in two")


def byzantine_cfl(p: Picture) -> None:
    p.box(30, 60, 190, 110)
    for i, (x, y) in enumerate([(60, 95), (105, 90), (150, 95), (70, 140), (118, 138), (180, 130)]):
        p.client(x, y, RED if i == 5 else BLUE, hostile=i == 5)
    p.arrow(235, 115, 330, 115)
    p.say(283, 100, "bipartition")
    p.box(345, 60, 160, 110, BLUE)
    for x, y in [(375, 95), (420, 90), (470, 95), (385, 140), (440, 138)]:
        p.client(x, y, BLUE)
    p.say(425, 50, "the larger side trains on")
    p.client(575, 115, RED, hostile=True)
    p.say(575, 150, "excluded")
    p.say(320, 200, "the smaller side is excluded in all later rounds")


SHARES = (0.0, 0.75, 0.25, 1.0, 0.5, 0.1)  # of the second of two distributions, of six clients


def fedem(p: Picture) -> None:
    at = {BLUE: 220, ORANGE: 420}
    for color, x in at.items():
        p.model(x, 45, color)
    for i, share in enumerate(SHARES):
        x, y, width = 120 + 80 * i, 160, 44 * share
        for color, weight in ((BLUE, 1 - share), (ORANGE, share)):
            if weight:
                p.line(at[color], 64, x, y - 14, color, 1 + 4 * weight)
        p.append(f'<rect x="{x - 22}" y="{y - 10}" width="{44 - width}" height="20" fill="{BLUE}"/>')
        p.append(f'<rect x="{x + 22 - width}" y="{y - 10}" width="{width}" height="20" fill="{ORANGE}"/>')
    p.say(320, 200, "each example weighs the models; each client has a mixture of them")


def fedrc(p: Picture) -> None:
    for left, color, names in ((60, BLUE, ("cat", "dog")), (350, ORANGE, ("dog", "cat"))):
        p.box(left, 45, 230, 105, color)
        p.say(left + 115, 32, "one concept" if color == BLUE else "another concept")
        for i, (first, second) in enumerate(((0, 1), (1, 1), (0, 0))):
            x = left + 40 + 75 * i
            p.client(x, 75, color)
            p.say(x, 110, names[first])
            p.say(x, 130, names[second])
    p.say(320, 180, "models divide clients by what label an input has,")
    p.say(320, 200, "not by how many of each label they have")


def fedsoft(p: Picture) -> None:
    at = {BLUE: 100, ORANGE: 540}
    for color, x in at.items():
        p.model(x, 110, color, 36)
        p.say(x, 150, "centre")
    for share, y in ((0.2, 60), (0.5, 150), (0.8, 75)):
        x = 100 + 440 * share
        for color, weight in ((BLUE, 1 - share), (ORANGE, share)):
            p.line(x, y, at[color] + (18 if color == BLUE else -18), 110, color, 1 + 4 * weight, "2 5")
        p.model(x, y, GREY, 22)
    p.say(320, 30, "a model of each client, pulled by its shares")
    p.say(320, 203, "a centre is the mean of its clients' models")


def federated_clustering(p: Picture) -> None:
    p.ring(190, 110, 70)
    p.client(190, 110, BLUE)
    p.say(190, 60, "own gradient")
    for x, y in [(150, 120), (225, 122), (180, 150), (235, 90)]:
        p.append(f'<circle cx="{x}" cy="{y}" r="7" fill="{BLUE}"/>')
    for x, y in [(430, 60), (455, 90), (420, 105), (470, 60), (480, 100)]:
        p.append(f'<circle cx="{x}" cy="{y}" r="7" fill="{ORANGE}"/>')
    p.client(560, 170, RED, hostile=True)
    p.line(190, 110, 240, 160, INK, 1, "3 3")
    p.say(250, 170, "radius τ", anchor="start")
    p.say(190, 25, "averaged")
    p.say(450, 135, "too far: no effect")
    p.say(320, 203, "gradients of all clients, at the model of one client")


def myopic_clustering(p: Picture) -> None:
    p.line(60, 110, 580, 110, GREY)
    for x, color, words in (
        (150, BLUE, "moves on"),
        (310, BLUE, "at a saddle: gradient 0"),
        (500, ORANGE, "at its optimum: gradient 0"),
    ):
        p.model(x, 110, color, 26)
        p.say(x, 66, words)
    p.ring(310, 110, 34)
    p.ring(500, 110, 34)
    p.line(344, 110, 466, 110, INK, 3)
    p.say(405, 168, "equal gradients: one cluster, by mistake")
    p.say(320, 200, "gradients are taken at different models, and compared")


def momentum_clustering(p: Picture) -> None:
    for x, y, color in [(130, 80, BLUE), (160, 130, BLUE), (190, 90, BLUE), (440, 75, ORANGE), (470, 120, ORANGE)]:
        for dx, dy in ((-34, 22), (-22, 8), (-9, 14)):
            p.append(f'<circle cx="{x + dx}" cy="{y + dy}" r="4" fill="{color}" opacity="0.35"/>')
        p.append(f'<circle cx="{x}" cy="{y}" r="8" fill="{color}"/>')
    for x, y, color in ((160, 100, BLUE), (455, 98, ORANGE)):
        p.ring(x, y, 75, color)
        p.line(x - 7, y, x + 7, y, INK, 3)
        p.line(x, y - 7, x, y + 7, INK, 3)
    p.say(310, 100, "K centres")
    p.say(320, 203, "momenta: averages of past gradients, less noisy than one gradient")


def fesem(p: Picture) -> None:
    for x, y, color in ((180, 100, BLUE), (450, 100, ORANGE)):
        p.model(x, y, color)
        for dx, dy in ((-70, -35), (-60, 45), (65, -40)):
            p.client(x + dx, y + dy, color)
            p.line(x + dx * 0.75, y + dy * 0.75, x + dx * 0.28, y + dy * 0.28, color)
    p.line(315, 30, 315, 170, GREY, 2, "5 4")
    p.say(320, 203, "models in the space of parameters: each client joins the nearest")


def one_shot(p: Picture) -> None:
    for (x, y), color in zip(clients(p, 150, 40, 38), HIDDEN, strict=True):
        p.model(x, y - 45, color, 20)
    p.say(135, 65, "1. train alone")
    p.arrow(255, 110, 310, 110)
    for x, y, color in ((370, 90, BLUE), (430, 140, ORANGE)):
        p.ring(x, y, 32, color)
        for dx, dy in ((-12, 6), (12, 8), (2, -13)):
            p.model(x + dx, y + dy, color, 13)
    p.say(400, 40, "2. k-means of the models")
    p.arrow(475, 110, 520, 110)
    for y, color in ((80, BLUE), (145, ORANGE)):
        p.model(550, y, color, 24)
        for i in range(3):
            p.append(f'<circle cx="{580 + 18 * i}" cy="{y}" r="7" fill="{color}"/>')
    p.say(580, 40, "3. FedAvg in each")


def flhc(p: Picture) -> None:
    order = [BLUE, BLUE, BLUE, ORANGE, ORANGE, ORANGE]
    at = clients(p, 175, 130, 75, order)
    x = [place[0] for place in at]
    for a, b, y, below in ((0, 1, 130, 160), (3, 4, 135, 160)):
        p.append(f'<path d="M{x[a]} {below}V{y}H{x[b]}V{below}" fill="none" stroke="{order[a]}" stroke-width="2"/>')
    for a, m, y in ((0, 2, 105), (3, 5, 110)):
        mid = (x[a] + x[a + 1]) / 2
        bottom = 130 if a == 0 else 135
        path = f"M{mid} {bottom}V{y}H{x[m]}V160"
        p.append(f'<path d="{path}" fill="none" stroke="{order[a]}" stroke-width="2"/>')
    p.append(f'<path d="M205 105V40H430V110" fill="none" stroke="{GREY}" stroke-width="2"/>')
    p.line(90, 72, 560, 72, INK, 2, "5 4")
    p.say(565, 77, "cut", anchor="start")
    p.say(320, 25, "dendrogram of the updates")


def pacfl(p: Picture) -> None:
    turns = {BLUE: (-1.25, -0.95), ORANGE: (-0.35, -0.1)}
    for color, angles in turns.items():
        for angle in angles:
            p.arrow(110, 170, 110 + 110 * math.cos(angle), 170 + 110 * math.sin(angle), color, 3)
    p.say(150, 40, "1. vectors of each client's inputs")
    p.append(f'<path d="M155 108A76 76 0 0 1 182 144" fill="none" stroke="{INK}" stroke-width="2"/>')
    p.say(186, 118, "angle", anchor="start")
    p.arrow(270, 125, 320, 125)
    for x, color in ((370, BLUE), (500, ORANGE)):
        for i in range(2):
            p.client(x + 40 * i, 165, color)
        p.append(f'<path d="M{x} 150V125H{x + 40}V150" fill="none" stroke="{color}" stroke-width="2"/>')
    p.append(f'<path d="M390 125V70H520V125" fill="none" stroke="{GREY}" stroke-width="2"/>')
    p.line(345, 95, 565, 95, INK, 2, "5 4")
    p.say(455, 40, "2. a dendrogram of the angles, cut once")
    p.say(320, 203, "then FedAvg in each cluster")


def flux(p: Picture) -> None:
    p.model(75, 110, GREY)
    for y, color, middle in ((75, BLUE, 195), (155, ORANGE, 255)):
        p.client(130, y, color)
        path = f"M{middle - 40} {y + 15}Q{middle - 15} {y + 10} {middle} {y - 25}T{middle + 40} {y + 15}"
        p.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
    p.say(190, 32, "1. mean and deviation of features")
    p.arrow(315, 115, 355, 115)
    for x, y, color in ((400, 75, BLUE), (425, 88, BLUE), (408, 100, BLUE), (470, 140, ORANGE), (492, 155, ORANGE)):
        p.append(f'<circle cx="{x}" cy="{y}" r="6" fill="{color}"/>')
    p.ring(411, 88, 32, BLUE)
    p.ring(481, 148, 32, ORANGE)
    p.say(450, 32, "2. clusters of them")
    p.client(590, 100, GREY)
    p.arrow(572, 105, 516, 135, ORANGE, 2, "5 4")
    p.say(580, 145, "3. a newcomer")
    p.say(580, 163, "without labels")
    p.say(320, 203, "FedAvg before, then FedAvg in each cluster")


def fedgroup(p: Picture) -> None:
    p.model(110, 150, GREY)
    for angle, color in ((-1.4, BLUE), (-1.15, BLUE), (-1.7, BLUE), (-0.3, ORANGE), (-0.05, ORANGE), (0.2, ORANGE)):
        u, v = 110 + 85 * math.cos(angle), 150 + 85 * math.sin(angle)
        p.arrow(110 + 20 * math.cos(angle), 150 + 20 * math.sin(angle), u, v, color)
    p.say(150, 40, "1. first updates from one model")
    p.arrow(255, 115, 305, 115)
    for y, color in ((90, BLUE), (150, ORANGE)):
        p.model(345, y, color)
        for i in range(3):
            p.client(385 + 28 * i, y, color)
    p.say(400, 40, "2. groups of directions")
    p.client(560, 120, BLUE)
    p.arrow(545, 115, 470, 95, BLUE, 2, "5 4")
    p.say(560, 155, "3. a new client joins")
    p.say(560, 173, "by its first update")
    p.say(320, 203, "FedAvg in each group")


def fedgwc(p: Picture) -> None:
    for shift, color in ((0, BLUE), (12, BLUE), (45, ORANGE), (58, ORANGE)):
        path = f"M30 {75 + shift}Q90 {85 + shift} 165 {110 + shift}"
        p.append(f'<path d="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
    p.line(30, 105, 165, 138, INK, 2, "5 4")
    p.say(180, 143, "mean", anchor="start")
    p.say(120, 40, "1. losses along the local steps:")
    p.say(120, 200, "rewards for those near the mean")
    p.arrow(240, 115, 280, 115)
    for row in range(4):
        for column in range(4):
            p.model(
                322 + 24 * column, 82 + 24 * row, ((BLUE, "#dddddd"), ("#dddddd", ORANGE))[row // 2][column // 2], 20
            )
    p.say(358, 40, "2. mean rewards of")
    p.say(358, 58, "every two clients")
    p.arrow(430, 115, 465, 115)
    clusters(p, 490)
    p.say(550, 40, "3. divide, and")
    p.say(550, 58, "begin again inside")


def stocfl(p: Picture) -> None:
    for (x, y), color in zip(((60, 90), (120, 130), (80, 160), (170, 85), (190, 150)), HIDDEN, strict=False):
        p.client(x, y, color)
        p.ring(x, y, 18)
    p.say(125, 40, "1. each is a cluster")
    p.arrow(235, 120, 280, 120)
    for x, y, color, count in ((350, 100, BLUE, 2), (350, 155, ORANGE, 3)):
        for i in range(count):
            p.client(x - 30 + 30 * i, y, color)
        p.box(x - 52, y - 20, 30 * count + 14, 40)
    p.say(365, 40, "2. similar ones merge")
    p.say(365, 60, "cos ≥ τ")
    p.arrow(445, 120, 485, 120)
    p.model(570, 75, GREY)
    for y, color in ((125, BLUE), (165, ORANGE)):
        p.model(530, y, color, 24)
        p.arrow(548, y - 6, 562, 95, GREY, 2, "3 3")
    p.say(555, 25, "3. their models are pulled")
    p.say(555, 43, "to a common one")
    p.say(320, 203, "the number of clusters follows from the threshold")


def feddrift(p: Picture) -> None:
    steps = (BLUE, BLUE, BLUE), (BLUE, ORANGE, ORANGE), (ORANGE, ORANGE, BLUE)
    for t, colors in enumerate(steps):
        p.say(50 + 75 * t, 60, f"step {t + 1}")
        for i, color in enumerate(colors):
            p.client(50 + 75 * t, 85 + 35 * i, color)
    p.say(125, 25, "1. cells: clients and steps")
    p.arrow(235, 120, 275, 120)
    p.model(340, 75, BLUE)
    for y in (118, 160):
        p.model(340, y, ORANGE)
        p.ring(340, y, 21)
    p.say(340, 25, "2. who drifts gets")
    p.say(340, 43, "a new model")
    p.arrow(405, 120, 445, 120)
    p.model(530, 95, BLUE, 36)
    p.model(530, 145, ORANGE, 36)
    p.say(530, 25, "3. a step later, those that")
    p.say(530, 43, "fit each other's cells merge")
    p.say(320, 203, "a client trains each model on the cells that belong to it")


def ditto(p: Picture) -> None:
    p.model(320, 40, GREY)
    for (x, y), color in zip(clients(p), HIDDEN, strict=True):
        p.model(x, y - 55, color, 24)
        p.line(x, y - 40, x, y - 14, color)
        p.line(320 + (x - 320) * 0.1, 58, x, y - 70, GREY, 2, "2 5")
    p.say(345, 45, "global model: pulls with weight λ", anchor="start")
    p.say(320, 203, "personal models stay near the global one")


def knn_per(p: Picture) -> None:
    p.ring(170, 105, 60)
    for x, y, color in [
        (150, 80, BLUE),
        (200, 90, BLUE),
        (160, 135, GREEN),
        (200, 130, BLUE),
        (260, 60, GREEN),
        (80, 60, GREEN),
    ]:
        p.append(f'<circle cx="{x}" cy="{y}" r="7" fill="{color}"/>')
    p.line(164, 105, 176, 105, INK, 3)
    p.line(170, 99, 170, 111, INK, 3)
    p.say(170, 25, "own examples near the input")
    p.say(320, 110, "λ ·  neighbours  +  (1 − λ) ·", anchor="start")
    p.model(545, 105, GREY)
    p.say(545, 145, "global model")


def _parts(p: Picture, body: str | None, head: str | None) -> None:
    """Draws a model of two parts over each client; a part with a colour is common, one of None is the client's own."""
    for (x, y), color in zip(clients(p), HIDDEN, strict=True):
        p.model(x, y - 40, body or color, 24)
        p.model(x, y - 68, head or color, 24)
        p.line(x, y - 28, x, y - 14)
    p.model(320, 38, GREY)
    for x in (120, 200, 280, 360, 440, 520):
        top = 125 if body else 97
        p.line(320 + (x - 320) * 0.1, 54, x, top - 14, GREY, 2, "2 5")


def fedper(p: Picture) -> None:
    _parts(p, GREY, None)
    p.say(345, 43, "common body, averaged", anchor="start")
    p.say(320, 203, "each client keeps its own head")


def fedrep(p: Picture) -> None:
    _parts(p, GREY, None)
    p.say(345, 43, "common representation, averaged", anchor="start")
    p.say(320, 203, "in every round: first the head, then the representation")


def lg_fedavg(p: Picture) -> None:
    _parts(p, None, GREY)
    p.say(345, 43, "common head, averaged", anchor="start")
    p.say(320, 203, "each client keeps its own representation")


def fedbn(p: Picture) -> None:
    p.model(320, 38, GREY)
    for (x, y), color in zip(clients(p), HIDDEN, strict=True):
        p.model(x, y - 50, GREY, 36)
        p.line(x - 18, y - 55, x + 18, y - 55, color, 5)
        p.line(x - 18, y - 43, x + 18, y - 43, color, 5)
        p.line(320 + (x - 320) * 0.1, 54, x, y - 70, GREY, 2, "2 5")
    p.say(345, 43, "all other layers, averaged", anchor="start")
    p.say(320, 203, "each client keeps its batch normalisation")


PICTURES: dict[str, Callable[[Picture], None]] = {
    f.__name__: f
    for f in (
        fedavg, local, oracle, ifca, hypcluster, clove, cfl, cfl_gp, byzantine_cfl, federated_clustering,
        myopic_clustering, momentum_clustering, fesem, fedem, fedrc, fedsoft, one_shot, flhc, pacfl, flux, fedgroup,
        stocfl, fedgwc, feddrift, ditto, knn_per, fedper, fedrep, lg_fedavg, fedbn,
    )
}  # fmt: skip


def picture(name: str) -> str:
    """Returns the SVG of a method."""
    p = Picture()
    PICTURES[name](p)
    return p.text(f"the idea of {name}")
