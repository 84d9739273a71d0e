"""Makes src/piston/assets/small.model: a sentencepiece tokenizer of 1024 pieces for demos, tests and small models.

    python scripts/make_tokenizer.py [OUT]

It behaves like PaliGemma's where it matters (pad 0, end 1, begin 2, unknown 3; text is neither normalised nor prefixed
with a space; a line break is a piece; unknown characters fall back to bytes). Its one peculiarity: " 0" … " 255" and
" -1" are one piece each, so a discretised state costs one token per number and each bin has an embedding of its own.
The sentences it learns from are made below. The result is the same file every time.
"""

import itertools
import random
import sys
from pathlib import Path

import sentencepiece

VOCAB_SIZE = 1024
SEED = 0
SPACE = "\u2581"  # how sentencepiece writes a space
OUT = Path(__file__).parents[1] / "src" / "piston" / "assets" / "small.model"

VERBS = "reach,pick up,grasp,lift,push,pull,move,slide,turn,rotate,place,put,drop,stack,open,close,press,wipe,fold,pour"
COLOURS = "red,green,blue,yellow,orange,purple,white,black,brown,grey,pink,cyan"
THINGS = (
    "block,cube,ball,cup,mug,bowl,plate,bottle,can,box,lid,pen,marker,spoon,fork,knife,towel,cloth,drawer,door,button,"
    "switch,knob,handle,sponge,basket,tray,pot,pan,kettle,book,screwdriver,peg,ring,battery,charger,carrot,apple,banana"
)
PLACES = (
    "on the table,on the plate,in the bowl,in the box,in the drawer,on the shelf,next to the cup,behind the bottle,"
    "in front of the robot,to the left,to the right,on top of the stove,under the lamp,into the basket,onto the tray,"
    "in the sink,away from the edge,in the middle of the table,with the left arm,with the right arm,with both hands"
)
EXTRAS = (
    "and then stop,slowly,carefully,without touching the others,and hand it over,then open the gripper,"
    "then close the gripper,and return home,until it is full,twice,in the order of their size"
)


def sentences() -> list[str]:
    """Robot tasks, plain and in the prompt format of π0.5, in an order that depends on SEED alone."""
    verbs, colours, things, places, extras = (words.split(",") for words in (VERBS, COLOURS, THINGS, PLACES, EXTRAS))
    rng = random.Random(SEED)
    tasks = [f"{verb} the {colour} {thing}" for verb, colour, thing in itertools.product(verbs, colours, things)]
    rng.shuffle(tasks)
    lines = []
    for number, task in enumerate(tasks[:6000]):
        text = task
        if number % 3 == 0:
            text += f" {rng.choice(places)}"
        if number % 7 == 0:
            text += f" {rng.choice(extras)}"
        if number % 5 == 0:
            text = text.capitalize() + "."
        if number % 2 == 0:
            bins = " ".join(str(rng.randint(-1, 255)) for _ in range(rng.randint(2, 14)))
            text = f"Task: {text}, State: {bins};\nAction: "
        lines.append(text)
    return lines


def make(out: Path) -> None:
    """Trains the model and writes it to `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences()),
            model_writer=file,
            model_type="bpe",
            vocab_size=VOCAB_SIZE,
            pad_id=0,
            eos_id=1,
            bos_id=2,
            unk_id=3,
            pad_piece="<pad>",
            eos_piece="<eos>",
            bos_piece="<bos>",
            user_defined_symbols=["\n", *(f"{SPACE}{bin}" for bin in range(-1, 256))],
            byte_fallback=True,
            character_coverage=1.0,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            num_threads=1,
            minloglevel=2,
        )


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else OUT)
