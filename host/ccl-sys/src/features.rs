//! Optional functions of a library.

use core::fmt;

use crate::sys::Table;

/// Names of the optional functions. Each has a flag that is true if the library has the function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Features(Vec<(&'static str, bool)>);

impl Features {
    pub(crate) fn of(table: &Table) -> Self {
        Self(table.optional())
    }

    /// Returns true if the library has the function `symbol`, as it is named in `nccl.h`.
    pub fn has(&self, symbol: &str) -> bool {
        self.0.contains(&(symbol, true))
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (name, present)) in self.0.iter().enumerate() {
            let sign = if *present { '+' } else { '-' };
            write!(f, "{}{sign}{}", if at == 0 { "" } else { " " }, &name[4..])?;
        }
        Ok(())
    }
}
