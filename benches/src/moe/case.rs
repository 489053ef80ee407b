//! Shapes, payloads and layouts to measure.

use core::fmt;
use core::str::FromStr;

use anyhow::{Result, bail};
use fusewire::{MoeLayout, MoePayload, MoeScales};

use super::routing::Routing;

/// Shape, payload and layout of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Case {
    pub(crate) hidden: usize,
    pub(crate) tokens: usize,
    pub(crate) payload: MoePayload,
    pub(crate) layout: MoeLayout,
}

impl Case {
    pub(super) fn payload_name(&self) -> &'static str {
        match self.payload {
            MoePayload::Same => "bf16",
            _ => "fp8",
        }
    }

    pub(super) fn layout_name(&self) -> &'static str {
        match self.layout {
            MoeLayout::RankMajor => "rank",
            _ => "expert",
        }
    }

    /// Returns the bytes of a token's payload and scales, and of a result.
    pub(super) fn bytes(&self) -> [usize; 2] {
        let payload = match self.payload {
            MoePayload::Same => 2 * self.hidden,
            _ => self.hidden + self.hidden / 128 * 4,
        };
        [payload, 2 * self.hidden]
    }

    /// Returns a number of calls that depends only on the case, because all ranks make the same
    /// number of calls, however many rows they receive.
    pub(super) fn calls(&self, routing: &Routing) -> usize {
        let each = self.bytes().iter().sum::<usize>();
        let bytes = self.tokens * routing.top_k as usize * each;
        (40_000_000 / bytes.max(1)).clamp(3, 300)
    }

    /// Returns the bytes of the results of a rank's experts, if all tokens select only them.
    pub(super) fn most_bytes(&self, routing: &Routing, ranks: u32) -> usize {
        ranks as usize * self.tokens * routing.top_k as usize * 2 * self.hidden
    }
}

/// Cases, each with the number of timed calls.
#[derive(Clone, Debug)]
pub(super) struct Schedule(pub(super) Vec<(Case, usize)>);

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (case, calls)) in self.0.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            let (payload, layout) = (case.payload_name(), case.layout_name());
            let Case { hidden, tokens, .. } = case;
            write!(f, "{comma}{hidden}:{tokens}:{payload}:{layout}:{calls}")?;
        }
        Ok(())
    }
}

impl FromStr for Schedule {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let entry = |part: &str| -> Result<(Case, usize)> {
            let words: Vec<_> = part.split(':').collect();
            let [hidden, tokens, payload, layout, calls] = words[..] else {
                bail!("{part} is not HIDDEN:TOKENS:PAYLOAD:LAYOUT:CALLS");
            };
            let case = Case {
                hidden: hidden.parse()?,
                tokens: tokens.parse()?,
                payload: match payload {
                    "bf16" => MoePayload::Same,
                    "fp8" => MoePayload::Fp8(MoeScales::F32),
                    _ => bail!("{payload} is not bf16 or fp8"),
                },
                layout: match layout {
                    "rank" => MoeLayout::RankMajor,
                    "expert" => MoeLayout::ExpertMajor,
                    _ => bail!("{layout} is not rank or expert"),
                },
            };
            Ok((case, calls.parse()?))
        };
        text.split(',').map(entry).collect::<Result<_>>().map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schedules_are_parsed() {
        let text = "2048:8:bf16:rank:300,7168:128:fp8:expert:3";
        let schedule: Schedule = text.parse().expect("a schedule");
        assert_eq!(schedule.to_string(), text);
        assert_eq!(schedule.0[1].0.bytes(), [7168 + 224, 14336]);
        assert!("2048:8:bf16:rank".parse::<Schedule>().is_err());
    }
}
