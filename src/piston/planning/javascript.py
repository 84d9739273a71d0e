"""Python arithmetic → JavaScript, for `formulas.py`: so that the page and the planner cannot disagree.

Translates only what both languages mean the same way and refuses the rest by line number.
"""

import ast

_BINARY: dict[type, str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Mod: "%"}
_COMPARE: dict[type, str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "===", ast.NotEq: "!==",
}  # fmt: skip
_CALLS = {"min": "Math.min", "max": "Math.max", "ceil": "Math.ceil", "floor": "Math.floor"}


def to_javascript(source: str) -> str:
    """The module's functions and constants as JavaScript. Raises ValueError, with the line, for anything else."""
    return "\n".join(filter(None, (_statement(node, "") for node in ast.parse(source).body))) + "\n"


def _unknown(node: ast.AST) -> ValueError:
    line = getattr(node, "lineno", "?")
    return ValueError(
        f"formulas line {line}: {type(node).__name__} has no translation to JavaScript; "
        "write it with the arithmetic that the module's docstring lists"
    )


def _statement(node: ast.stmt, indent: str) -> str:
    inner = indent + "  "
    match node:
        case ast.FunctionDef(
            args=ast.arguments(posonlyargs=[], vararg=None, kwonlyargs=[], kwarg=None, defaults=[]), decorator_list=[]
        ):
            arguments = ", ".join(a.arg for a in node.args.args)
            names = sorted({t.id for s in ast.walk(node) if isinstance(s, ast.Assign) for t in s.targets
                            if isinstance(t, ast.Name)} - {a.arg for a in node.args.args})  # fmt: skip
            declared = f"{inner}let {', '.join(names)};\n" if names else ""
            return f"function {node.name}({arguments}) {{\n{declared}{_block(node.body, inner)}\n}}"
        case ast.Assign(targets=[ast.Name(id=name)]) if not indent:
            return f"const {name} = {_expression(node.value)};"
        case ast.Assign(targets=[target]):
            return f"{indent}{_expression(target)} = {_expression(node.value)};"
        case ast.Return(value=ast.expr() as value):
            return f"{indent}return {_expression(value)};"
        case ast.If():
            text = f"{indent}if ({_expression(node.test)}) {{\n{_block(node.body, inner)}\n{indent}}}"
            return text + (f" else {{\n{_block(node.orelse, inner)}\n{indent}}}" if node.orelse else "")
        case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="range"), args=[count]), orelse=[]):
            head = f"{indent}for (let {name} = 0; {name} < {_expression(count)}; {name}++)"
            return f"{head} {{\n{_block(node.body, inner)}\n{indent}}}"
        case ast.Expr(value=ast.Constant(value=str())) | ast.ImportFrom(module="math"):
            return ""  # docstrings; min, ceil and their like are mapped by name
    raise _unknown(node)


def _block(body: list[ast.stmt], indent: str) -> str:
    return "\n".join(filter(None, (_statement(node, indent) for node in body)))


def _expression(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=bool()):
            raise _unknown(node)
        case ast.Constant(value=int() | float() | str()):
            return repr(node.value)
        case ast.Name():
            return node.id
        case ast.UnaryOp(op=ast.USub()):
            return f"(-{_expression(node.operand)})"
        case ast.BinOp() if type(node.op) in _BINARY:
            return f"({_expression(node.left)} {_BINARY[type(node.op)]} {_expression(node.right)})"
        case ast.Compare(ops=[operator], comparators=[right]) if type(operator) in _COMPARE:
            return f"({_expression(node.left)} {_COMPARE[type(operator)]} {_expression(right)})"
        case ast.Subscript():
            return f"{_expression(node.value)}[{_expression(node.slice)}]"
        case ast.Dict():
            pairs = (f"{_expression(k)}: {_expression(v)}" for k, v in zip(node.keys, node.values, strict=True) if k)
            return "{" + ", ".join(pairs) + "}"
        case ast.Call(func=ast.Name(id="len"), args=[argument]):
            return f"{_expression(argument)}.length"
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            arguments = ", ".join(_expression(a) for a in node.args)
            return f"{_CALLS.get(name, name)}({arguments})"
    raise _unknown(node)
