package rescue

import "slices"

// Confirm has the actor call Deps.Confirmed with a number once the kernel has what follows from all
// that it was told before, and has looked for all nodes that were named. Of two numbers that it has
// to confirm it may leave out the first. It never blocks.
func (a *Actor) Confirm(number uint64) {
	a.mu.Lock()
	same := a.asks == number
	a.asks = number
	a.mu.Unlock()
	if !same {
		a.runner.Poke()
	}
}

func (a *Actor) toConfirm() uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.asks
}

// confirm tells that the kernel has all that came before a number, unless a node has not been found
// yet.
func (a *Actor) confirm(number uint64) {
	if number != a.sure && !a.expecting() && !a.missing() {
		a.sure = number
		a.confirmed(number)
	}
}

// missing reports whether a node does not answer that the speaker does not take for dead.
func (a *Actor) missing() bool {
	for node := range a.nodes {
		if a.known[node].Failed && !slices.Contains(a.gone.nodes, node) {
			return true
		}
	}
	return false
}
