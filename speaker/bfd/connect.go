package bfd

import "time"

// connect opens the sockets that are missing or in trouble, and closes those that no session needs.
func (e *engine) connect(now time.Time) {
	e.connectAt = time.Time{}
	needed := map[listener]bool{}
	for _, s := range e.sessions {
		needed[s.key.listener()] = true
		if s.link == nil || s.trouble != "" || s.stale {
			e.dial(s, now)
		}
	}
	for l := range needed {
		if problem, ok := e.listeners[l]; !ok || problem != "" {
			e.listeners[l] = ""
			if err := e.wire.listen(l); err != nil {
				e.listeners[l] = err.Error()
				e.connectAt = now.Add(retry)
			}
			e.changed = e.changed || e.listeners[l] != problem
		}
	}
	for l, problem := range e.listeners {
		if !needed[l] {
			delete(e.listeners, l)
			if problem == "" {
				e.wire.unlisten(l)
			}
		}
	}
}

func (e *engine) dial(s *session, now time.Time) {
	s.hangUp()
	l, err := e.wire.dial(s.key, s.port, e.worker.opts.random)
	if err != nil {
		e.troubled(s, err, now)
		return
	}
	s.link, s.port, s.stale = l, l.sourcePort(), false
}

func (s *session) hangUp() {
	if s.link != nil {
		s.link.close()
		s.link = nil
	}
}

// troubled notes what is wrong with a link. It is soon opened again: its interface or address
// may have been replaced.
func (e *engine) troubled(s *session, err error, now time.Time) {
	if e.connectAt.IsZero() {
		e.connectAt = now.Add(retry)
	}
	if text := err.Error(); text != s.trouble {
		s.trouble, e.changed = text, true
		e.worker.report(change{Key: s.key, Problem: text})
	}
}

// problem says what keeps packets from coming and going.
func (e *engine) problem(s *session) string {
	if hearing := e.listeners[s.key.listener()]; hearing != "" {
		return hearing
	}
	if s.trouble != "" {
		return s.trouble
	}
	return s.strange
}
