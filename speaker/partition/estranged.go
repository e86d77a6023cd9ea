package partition

import (
	"slices"
	"time"
)

// A node that was cut off does not know who serves its addresses meanwhile, and holds the others
// for dead. If it announced what it computes from that, on its return connections of addresses that
// it never owned would reach it and be reset. So a node that may have been cut off is estranged: it
// takes no address that it does not answer for, until it has heard another speaker, or has waited
// long enough. The survivor of a crash is told from a node that is cut off by an interface that has
// a carrier, by the kernels of the others, which are silent, and by the API server, which answers
// it at once. Their kernels are asked after that once more: a cut that ends between the two would look the same.

// Times of a node that is estranged.
const (
	// ReturnHold is how long a node that reaches the API server, but no other speaker, stays
	// estranged, unless an administrator chooses otherwise: by then it has called the others several
	// times, and has missed three renewals of the Lease by a majority that it does not see, which are
	// two seconds apart.
	ReturnHold = 10 * time.Second
	// silentHolds is how many times as long one stays so that reaches nobody at all: spanning tree
	// keeps a switch port that has come up from forwarding for 30 s, and then the others have to be
	// called.
	silentHolds = 4
	// AskedSoon is how soon after the loss of a majority the API server has to be asked, and Promptly
	// how soon it has to answer, to show that it is not this node that is cut off. A node that has
	// just been connected again has to send its question once more, which TCP does after 200 ms.
	AskedSoon = 500 * time.Millisecond
	Promptly  = 180 * time.Millisecond
	// A node that is cut off finds the others dead one by one, and sees a majority for a while. What
	// it took from the first of them it gives up when it is estranged: doubt, and so much more for
	// each node, is longer than that takes.
	doubt       = 2 * time.Second
	doubtOfEach = 100 * time.Millisecond
	// AskedLately is within which time the API server has to have answered for its silence about a
	// majority to mean something.
	AskedLately = 3 * time.Second
	// MuteFor bounds how long a process that was frozen answers for nothing, not even for what it
	// owned: one attempt to exchange states with another speaker, and a second one.
	MuteFor = 2 * time.Second
)

// Contact is when the node last heard from somebody else.
type Contact struct {
	// Met is when the last exchange of states with another speaker began that succeeded, or the last
	// round of calls which showed that there is none.
	Met time.Time
	// Asked is when the last request began that the API server answered, and Took how long that
	// lasted.
	Asked time.Time
	Took  time.Duration
}

// estrangement is what is remembered of having been cut off.
type estrangement struct {
	on    bool
	since time.Time // when the node could hear the others again, as far as it can know
	// trusted is until when the node was not cut off, for sure.
	trusted time.Time
	met     time.Time // when it first heard another speaker after since, if it has
	// deaf is set when it could not hear them before: it had no carrier or was frozen.
	deaf bool
	// What follows is as of the last step.
	looked    bool
	unplugged bool
	carrier   []string  // interfaces with a carrier
	woke      time.Time // of the last freeze that was noted
	heard     bool      // a majority that this node does not see is heard of over the API server
	asked     time.Time // when the API server was last asked that answered
	reached   time.Time // since when it has answered, again and again
	// prompt is when the API server had answered, soon after since and promptly, and confirmAfter the same while only
	// the kernels of the others have to be asked after it.
	prompt, confirmAfter time.Time
}

// look is what a step makes of the facts first.
type look struct {
	// lost is set when the node no longer sees more than half of the speakers, found when it sees so
	// many again, and calm once it has seen them for long enough.
	lost, found, calm bool
}

// step takes in whether the node may have been cut off.
func (e *estrangement) step(now time.Time, f Facts, l look) {
	back := e.looked && slices.ContainsFunc(f.Carrier, func(name string) bool { return !slices.Contains(e.carrier, name) })
	woke, was := f.Woke.After(e.woke), e.on
	heard := f.Heard && !f.Speakers.Majority
	// A majority that is not heard of any more may have gone, if the API server can say so.
	deafened := e.heard && !heard && !f.Speakers.Majority && now.Sub(f.Contact.Asked) > AskedLately
	if f.Contact.Asked.Sub(e.asked) > AskedLately {
		e.reached = f.Contact.Asked
	}
	e.unplugged = f.Unplugged
	e.looked, e.carrier, e.woke, e.heard, e.asked = true, f.Carrier, f.Woke, heard, f.Contact.Asked
	switch {
	case !f.Others || f.ReturnHold == 0:
		e.on = false
		return
	case woke:
		e.on, e.deaf, e.since = true, true, f.Woke
	case back, deafened, f.Unplugged:
		e.on, e.deaf, e.since = true, true, now
	case e.on && l.found:
		e.since = now // what was heard before came from this side
	case l.lost && !e.on:
		e.on, e.deaf, e.since = true, false, now
	}
	if e.on && !was {
		e.trusted = now.Add(-doubt - time.Duration(len(f.Speakers.Live)+len(f.Speakers.Missing))*doubtOfEach)
	}
	if met := f.Contact.Met; e.met.Before(e.since) && !met.Before(e.since) {
		e.met = met
	}
	e.confirmAfter = time.Time{}
	e.on = e.on && !e.over(now, f, l.calm)
}

// over reports whether the node is estranged no more.
func (e *estrangement) over(now time.Time, f Facts, calm bool) bool {
	asked, met := !f.Contact.Asked.Before(e.since), !e.met.Before(e.since)
	if asked && e.prompt.Before(e.since) && f.Contact.Asked.Before(e.since.Add(AskedSoon)) && f.Contact.Took < Promptly {
		e.prompt = f.Contact.Asked.Add(f.Contact.Took)
	}
	switch {
	case f.Unplugged:
		return false
	case met && calm && (!f.Speakers.Lost || !now.Before(e.met.Add(Reunion))):
		return true // who is missing now, others would have told of
	case asked && e.heard:
		return true // the majority says what it answers for
	case !e.deaf && !e.prompt.Before(e.since) && f.Speakers.Survives(f.Self):
		if len(f.Speakers.Silent) == 0 || !f.Speakers.Confirmed.Before(e.prompt) {
			return true // the others are gone, not this node
		}
		e.confirmAfter = e.prompt // they were silent when this node heard nobody, maybe
	}
	if asked && now.Sub(e.asked) <= AskedLately {
		return !now.Before(e.bound(f.ReturnHold))
	}
	return !now.Before(e.since.Add(silentHolds * f.ReturnHold))
}

// bound returns when a node that reaches the API server and no other speaker has waited for long
// enough.
func (e *estrangement) bound(hold time.Duration) time.Time {
	if e.reached.After(e.since) {
		return e.reached.Add(hold)
	}
	return e.since.Add(hold)
}

// mute reports whether the node was frozen and has heard nobody since.
func (e *estrangement) mute(now time.Time, f Facts) bool {
	return e.on && f.Contact.Met.Before(e.woke) && now.Before(e.woke.Add(MuteFor))
}

// next returns when something changes by itself, if nothing else is heard; the zero time means
// never.
func (e *estrangement) next(now time.Time, f Facts) (next time.Time) {
	if !e.on {
		return next
	}
	for _, at := range []time.Time{e.woke.Add(MuteFor), e.met.Add(Reunion), e.asked.Add(AskedLately + time.Millisecond),
		e.bound(f.ReturnHold), e.since.Add(silentHolds * f.ReturnHold)} {
		if now.Before(at) && (next.IsZero() || at.Before(next)) {
			next = at
		}
	}
	return next
}
