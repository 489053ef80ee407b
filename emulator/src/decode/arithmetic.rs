//! Arithmetic, comparisons and conversions.

use super::types::{float_modifiers, format, width};
use super::{Context, Decoder, special};
use crate::alu;
use crate::error::Result;
use crate::float::{Arith, Format, Modifiers};
use crate::program::{Conversion, NO_REG, Op, Reg, Src};
use crate::ptx::Operand;

impl<'a> Decoder<'a> {
    pub(super) fn mov(
        &mut self,
        c: &mut Context<'a>,
        words: &[&str],
        operands: &[Operand<'a>],
    ) -> Result<bool> {
        let [kind] = words else { return Ok(false) };
        let Some(bits) = width(kind) else {
            return Ok(false);
        };
        let mut lists = operands.iter().filter_map(|operand| match operand {
            Operand::List(parts) => Some(parts.len()),
            _ => None,
        });
        if lists.any(|parts| !matches!(parts, 2 | 4 | 8) || bits < 8 * parts as u32) {
            return Ok(false);
        }
        match operands {
            // Packing: the first element is in the low bits.
            [d, Operand::List(parts)] => {
                let d = self.destination(c, Some(d))?;
                let each = bits / parts.len() as u32;
                let part = format!("b{each}");
                let mut all = self.constant(0);
                for (at, operand) in parts.iter().enumerate() {
                    let value = self.value(c, operand, &part)?;
                    let value = self.temporary(c, alu::truncate(each), each, &[value]);
                    let shift = self.constant(u64::from(each) * at as u64);
                    let shifted = self.temporary(c, alu::shift(true), bits, &[value, shift]);
                    all = self.temporary(c, alu::or(), bits, &[all, shifted]);
                }
                self.alu(c, alu::copy(), d, &[all]);
            }
            // Unpacking.
            [Operand::List(parts), a] => {
                let a = self.value(c, a, kind)?;
                let a = self.temporary(c, alu::copy(), bits, &[a]);
                let each = bits / parts.len() as u32;
                for (at, operand) in parts.iter().enumerate() {
                    let d = self.destination(c, Some(operand))?;
                    if d == NO_REG {
                        continue;
                    }
                    let shift = self.constant(u64::from(each) * at as u64);
                    let value = self.temporary(c, alu::shift(false), bits, &[a, shift]);
                    self.alu(c, alu::truncate(each), d, &[value]);
                }
            }
            [d, Operand::Name(name, 0)]
                if self.lookup(c, name).is_none() && special(name).is_some() =>
            {
                let d = self.destination(c, Some(d))?;
                if let Some(register) = special(name) {
                    c.emit(Op::Special { register, d });
                }
            }
            [d, a] => {
                let d = self.destination(c, Some(d))?;
                let a = self.value(c, a, kind)?;
                self.alu(c, alu::truncate(bits), d, &[a]);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    pub(super) fn compare(
        &mut self,
        c: &mut Context<'a>,
        name: &str,
        words: &[&str],
        operands: &[Operand<'a>],
    ) -> Result<bool> {
        let mut words: Vec<&str> = words.to_vec();
        let Some(kind) = words.pop() else {
            return Ok(false);
        };
        let ftz = words.iter().position(|word| *word == "ftz");
        let ftz = ftz.map(|at| words.remove(at)).is_some();
        // `set` has the type of its result before the type of its operands.
        let result = if name == "set" { words.pop() } else { None };
        let (Some(comparison), combine) = (words.first().copied(), words.get(1).copied()) else {
            return Ok(false);
        };
        let [d, _, _, ..] = operands else {
            return Ok(false);
        };
        let [p, q] = self.destinations(c, Some(d))?;
        let mut a = self.source(c, operands, 1, kind)?;
        let mut b = self.source(c, operands, 2, kind)?;
        let mut compared = kind;
        if let Some((from, false)) = format(kind)
            && (ftz || !matches!(from, Format::F32 | Format::F64))
        {
            // Widening to f32 is exact.
            let modifiers = Modifiers {
                ftz,
                ..Modifiers::default()
            };
            for side in [&mut a, &mut b] {
                *side = self.widen(c, *side, from, modifiers);
            }
            compared = "f32";
        }
        let Some(f) = alu::comparison(comparison, compared) else {
            return Ok(false);
        };
        if name == "setp" && combine.is_none() && q == NO_REG && operands.len() == 3 {
            self.alu(c, f, p, &[a, b]);
            return Ok(true);
        }
        let compared = self.temporary(c, f, 1, &[a, b]);
        let inverted = self.temporary(c, alu::invert(), 1, &[compared]);
        let combined = match (combine, operands.len()) {
            (Some(word), 4) => {
                let Some(f) = alu::combine(word) else {
                    return Ok(false);
                };
                let third = self.source(c, operands, 3, "pred")?;
                let first = self.temporary(c, f, 1, &[compared, third]);
                [first, self.temporary(c, f, 1, &[inverted, third])]
            }
            (None, 3) => [compared, inverted],
            _ => return Ok(false),
        };
        if let Some(result) = result {
            let one = match result {
                "f32" => 0x3f80_0000,
                "u32" | "s32" | "b32" => 0xffff_ffff,
                _ => return Ok(false),
            };
            let values = [self.constant(one), self.constant(0), combined[0]];
            self.alu(c, alu::select(), p, &values);
        } else {
            self.alu(c, alu::copy(), p, &[combined[0]]);
            if q != NO_REG {
                self.alu(c, alu::copy(), q, &[combined[1]]);
            }
        }
        Ok(true)
    }

    /// Emits a conversion of an operand to f32.
    pub(super) fn widen(
        &self,
        c: &mut Context<'a>,
        s: Src,
        from: Format,
        modifiers: Modifiers,
    ) -> Src {
        let d = c.fresh(32);
        let conversion = Conversion::Float(from, Format::F32, modifiers, None);
        c.prepare(Op::Convert {
            conversion,
            d,
            s: [s; 2],
        });
        Src::register(d)
    }

    pub(super) fn select(
        &mut self,
        c: &mut Context<'a>,
        name: &str,
        words: &[&str],
        operands: &[Operand<'a>],
    ) -> Result<bool> {
        let ftz = words.contains(&"ftz");
        let words: Vec<&str> = words.iter().copied().filter(|it| *it != "ftz").collect();
        let Some(kind) = words.first() else {
            return Ok(false);
        };
        let d = self.destination(c, operands.first())?;
        let a = self.source(c, operands, 1, kind)?;
        let b = self.source(c, operands, 2, kind)?;
        let chosen = match (name, &words[1..]) {
            ("selp", []) => self.source(c, operands, 3, "pred")?,
            ("slct", [kind @ ("s32" | "f32")]) => {
                let mut third = self.source(c, operands, 3, kind)?;
                if ftz {
                    let modifiers = Modifiers {
                        ftz,
                        ..Modifiers::default()
                    };
                    third = self.widen(c, third, Format::F32, modifiers);
                }
                let zero = self.constant(0);
                let f = alu::comparison("ge", kind).expect("both types can be compared");
                self.temporary(c, f, 1, &[third, zero])
            }
            _ => return Ok(false),
        };
        self.alu(c, alu::select(), d, &[a, b, chosen]);
        Ok(true)
    }

    pub(super) fn convert(
        &mut self,
        c: &mut Context<'a>,
        words: &[&str],
        operands: &[Operand<'a>],
    ) -> Result<bool> {
        let [modifiers @ .., to, from] = words else {
            return Ok(false);
        };
        let pack = modifiers.first() == Some(&"pack");
        let Some(mode) = float_modifiers(modifiers) else {
            return Ok(false);
        };
        let d = self.destination(c, operands.first())?;
        let a = self.source(c, operands, 1, from)?;
        let (Some(to_bits), Some(from_bits)) = (width(to), width(from)) else {
            return Ok(false);
        };
        if pack {
            return Ok(false);
        }
        let signed = |kind: &str| kind.starts_with('s');
        let conversion = match (format(from), format(to)) {
            (Some((from, false)), Some((to, true))) if operands.len() == 3 => {
                let b = self.source(c, operands, 2, words[words.len() - 1])?;
                c.emit(Op::Convert {
                    conversion: Conversion::Float(from, to, mode, Some(true)),
                    d,
                    s: [a, b],
                });
                return Ok(true);
            }
            (Some((from, true)), Some((to, true))) => {
                Conversion::Float(from, to, mode, Some(false))
            }
            (Some((from, false)), Some((to, false))) => {
                let integral = modifiers.iter().any(|word| word.ends_with('i'));
                if from == to && integral {
                    Conversion::Integral(from, mode)
                } else {
                    Conversion::Float(from, to, mode, None)
                }
            }
            (Some((from, false)), None) => {
                Conversion::ToInteger(from, to_bits as u8, signed(to), mode)
            }
            (None, Some((to, false))) => {
                Conversion::FromInteger(from_bits as u8, signed(from), to, mode)
            }
            (None, None) => {
                return self.convert_integer(c, d, a, from, to, mode.saturate);
            }
            _ => return Ok(false),
        };
        c.emit(Op::Convert {
            conversion,
            d,
            s: [a, a],
        });
        if let Conversion::ToInteger(..) = conversion {
            self.extend(c, d, to);
        }
        Ok(true)
    }

    /// Sign-extends the result of a conversion to a signed type to the width of its register.
    pub(super) fn extend(&mut self, c: &mut Context<'a>, d: Reg, kind: &str) {
        let register = c.widths.get(d as usize).map_or(0, |it| u32::from(*it));
        let bits = width(kind).unwrap_or(64);
        if kind.starts_with('s')
            && let Some(f) = alu::sign_extend(bits, register)
        {
            self.alu(c, f, d, &[Src::register(d)]);
        }
    }

    pub(super) fn convert_integer(
        &mut self,
        c: &mut Context<'a>,
        d: Reg,
        a: Src,
        from: &str,
        to: &str,
        saturate: bool,
    ) -> Result<bool> {
        let (from_bits, to_bits) = (width(from).unwrap_or(64), width(to).unwrap_or(64));
        let signed = from.starts_with('s');
        let mut value = self.temporary(c, alu::truncate(from_bits), from_bits, &[a]);
        if signed && let Some(f) = alu::sign_extend(from_bits, 64) {
            value = self.temporary(c, f, 64, &[value]);
        }
        if saturate {
            let kind = if signed { "s64" } else { "u64" };
            let (low, high): (i128, i128) = if to.starts_with('s') {
                (-(1 << (to_bits - 1)), (1 << (to_bits - 1)) - 1)
            } else {
                (0, (1 << to_bits) - 1)
            };
            let (least, most) = if signed {
                (i128::from(i64::MIN), i128::from(i64::MAX))
            } else {
                (0, i128::from(u64::MAX))
            };
            let low = self.constant(low.max(least) as u64);
            let high = self.constant(high.min(most) as u64);
            let of = |name| alu::integer(name, &[kind]).expect("both types have an order");
            value = self.temporary(c, of("max"), 64, &[value, low]);
            value = self.temporary(c, of("min"), 64, &[value, high]);
        }
        self.alu(c, alu::truncate(to_bits), d, &[value]);
        self.extend(c, d, to);
        Ok(true)
    }

    /// Decodes integer, logical and floating-point arithmetic.
    pub(super) fn arithmetic(
        &mut self,
        c: &mut Context<'a>,
        name: &str,
        words: &[&'a str],
        operands: &[Operand<'a>],
    ) -> Result<bool> {
        let Some(kind) = words.last().copied() else {
            return Ok(false);
        };
        if let ("testp", [property, _]) = (name, words)
            && let Some((format, false)) = format(kind)
            && let Some(at) = alu::TESTP.iter().position(|it| it == property)
        {
            let d = self.destination(c, operands.first())?;
            let s = self.source(c, operands, 1, kind)?;
            c.emit(Op::Testp {
                kind: at as u8,
                format,
                d,
                s,
            });
            return Ok(true);
        }
        if let ("lop3", ["b32"]) = (name, words) {
            return self.lop3(c, operands);
        }
        if name == "bfi" && operands.len() == 5 {
            return self.bfi(c, kind, operands);
        }
        if words.contains(&"cc") || matches!(name, "addc" | "subc") {
            return self.carry(c, name, words, operands);
        }
        let found = alu::integer(name, words).or_else(|| alu::float(name, words));
        if let Some(f) = found {
            let d = self.destination(c, operands.first())?;
            let sources = operands.len() - 1;
            if sources > 3 {
                return Ok(false);
            }
            let zero = self.constant(0);
            let mut s = [zero; 3];
            for at in 0..sources {
                // Shift amounts and bit positions are 32-bit values. The third operand of a
                // widening multiplication is as wide as the result.
                let wide = words.contains(&"wide");
                let kind = match (name, at) {
                    ("shl" | "shr" | "bfe", 1) | ("bfe", 2) => "u32",
                    ("mad", 2) if wide && kind.ends_with("16") => "b32",
                    ("mad", 2) if wide => "b64",
                    _ => kind,
                };
                s[at] = self.source(c, operands, at + 1, kind)?;
            }
            c.emit(Op::Alu { f, d, s });
            return Ok(true);
        }
        self.float(c, name, words, operands)
    }

    pub(super) fn float(
        &mut self,
        c: &mut Context<'a>,
        name: &str,
        words: &[&str],
        operands: &[Operand<'a>],
    ) -> Result<bool> {
        let [modifiers @ .., kind] = words else {
            return Ok(false);
        };
        let Some((format, packed)) = format(kind) else {
            return Ok(false);
        };
        let Some(mode) = float_modifiers(modifiers) else {
            return Ok(false);
        };
        let approximate = modifiers.contains(&"approx");
        let op = match (name, approximate) {
            ("add", false) => Arith::Add,
            ("sub", false) => Arith::Sub,
            ("mul", false) => Arith::Mul,
            ("fma" | "mad", false) => Arith::Fma,
            ("div", true) => Arith::DivApprox,
            ("div", false) if modifiers.contains(&"full") => Arith::DivFull,
            ("div", false) => Arith::Div,
            ("rcp", true) => Arith::RcpApprox,
            ("rcp", false) => Arith::Rcp,
            ("sqrt", true) => Arith::SqrtApprox,
            ("sqrt", false) => Arith::Sqrt,
            ("rsqrt", true) => Arith::RsqrtApprox,
            ("min", false) => Arith::Min,
            ("max", false) => Arith::Max,
            ("neg", false) => Arith::Neg,
            ("abs", false) => Arith::Abs,
            ("ex2", true) => Arith::Ex2,
            ("lg2", true) => Arith::Lg2,
            ("sin", true) => Arith::Sin,
            ("cos", true) => Arith::Cos,
            ("tanh", true) => Arith::Tanh,
            ("copysign", false) => Arith::Copysign,
            _ => return Ok(false),
        };
        if operands.len() > 4 || operands.len() < 2 {
            return Ok(false);
        }
        let d = self.destination(c, operands.first())?;
        let mut s = [self.constant(0); 3];
        for at in 1..operands.len() {
            s[at - 1] = self.source(c, operands, at, kind)?;
        }
        c.emit(Op::Float {
            op,
            format,
            packed,
            modifiers: mode,
            d,
            s,
        });
        Ok(true)
    }

    pub(super) fn lop3(&mut self, c: &mut Context<'a>, operands: &[Operand<'a>]) -> Result<bool> {
        let [d, _, _, _, Operand::Integer(table)] = operands else {
            return Ok(false);
        };
        let d = self.destination(c, Some(d))?;
        let mut s = [self.constant(0); 3];
        for (at, source) in s.iter_mut().enumerate() {
            *source = self.source(c, operands, at + 1, "b32")?;
        }
        // Sum of the minterms of the truth table.
        let of = |name| alu::integer(name, &["b32"]).expect("bitwise operations have this type");
        let mut inverse = s;
        for (inverse, source) in inverse.iter_mut().zip(s) {
            *inverse = self.temporary(c, of("not"), 32, &[source]);
        }
        let mut all = self.constant(0);
        for term in (0..8).filter(|term| table >> term & 1 != 0) {
            let pick = |at: usize| {
                if term >> (2 - at) & 1 != 0 {
                    s[at]
                } else {
                    inverse[at]
                }
            };
            let both = self.temporary(c, of("and"), 32, &[pick(0), pick(1)]);
            let product = self.temporary(c, of("and"), 32, &[both, pick(2)]);
            all = self.temporary(c, of("or"), 32, &[all, product]);
        }
        self.alu(c, alu::copy(), d, &[all]);
        Ok(true)
    }

    pub(super) fn bfi(
        &mut self,
        c: &mut Context<'a>,
        kind: &str,
        operands: &[Operand<'a>],
    ) -> Result<bool> {
        let bits = match kind {
            "b32" => 32,
            "b64" => 64,
            _ => return Ok(false),
        };
        let d = self.destination(c, operands.first())?;
        let a = self.source(c, operands, 1, kind)?;
        let b = self.source(c, operands, 2, kind)?;
        let position = self.source(c, operands, 3, "u32")?;
        let length = self.source(c, operands, 4, "u32")?;
        // The mask of the field, shifted to its position; positions beyond the width leave `b`.
        let field = self.temporary(c, alu::field(bits), bits, &[position, length]);
        let [and, shl] = [("and", "b32"), ("shl", kind)]
            .map(|(name, kind)| alu::integer(name, &[kind]).expect("the types are supported"));
        // The position is an 8-bit number.
        let eight_bits = self.constant(0xff);
        let position = self.temporary(c, and, 32, &[position, eight_bits]);
        let shifted = self.temporary(c, shl, bits, &[a, position]);
        self.alu(c, alu::blend(), d, &[shifted, b, field]);
        Ok(true)
    }

    pub(super) fn carry(
        &mut self,
        c: &mut Context<'a>,
        name: &str,
        words: &[&str],
        operands: &[Operand<'a>],
    ) -> Result<bool> {
        let words: Vec<&str> = words.iter().copied().filter(|it| *it != "cc").collect();
        let [kind] = words.as_slice() else {
            return Ok(false);
        };
        let wide = match *kind {
            "u32" | "s32" => false,
            "u64" | "s64" => true,
            _ => return Ok(false),
        };
        let (Some(value), Some(carry)) = (alu::with_carry(name, wide), alu::carry(name, wide))
        else {
            return Ok(false);
        };
        let d = self.destination(c, operands.first())?;
        let a = self.source(c, operands, 1, kind)?;
        let b = self.source(c, operands, 2, kind)?;
        let flag = match c.carry {
            Some(flag) => flag,
            None => c.fresh(1),
        };
        c.carry = Some(flag);
        let next = self.temporary(c, carry, 1, &[a, b, Src::register(flag)]);
        self.alu(c, value, d, &[a, b, Src::register(flag)]);
        self.alu(c, alu::copy(), flag, &[next]);
        Ok(true)
    }
}
