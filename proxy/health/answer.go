package health

import (
	"encoding/json"
	"net/http"
	"strconv"
	"time"

	"github.com/landfall-lb/landfall/internal/lb"
)

// serviceAnswer is the body on a health port, in the form of kube-proxy.
type serviceAnswer struct {
	Service struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"service"`
	LocalEndpoints      int  `json:"localEndpoints"`
	ServiceProxyHealthy bool `json:"serviceProxyHealthy"`
}

// answerService answers on the health port of a Service, whatever the path and the method: 200 when
// the rules in the kernel deliver to a ready endpoint of this node, and the node stays.
func (a *Actor) answerService(w http.ResponseWriter, at socket) {
	a.mu.Lock()
	var key lb.Key
	count := 0 // when it was taken away while the request was on its way
	if keys := a.byPort[at.port]; len(keys) > 0 {
		key = keys[0]
		count = a.services[key].Local[at.family]
	}
	healthy, leaving := a.healthy(a.deps.Now()), a.node.Leaving
	a.mu.Unlock()
	var body serviceAnswer
	body.Service.Namespace, body.Service.Name = key.Namespace, key.Name
	body.LocalEndpoints, body.ServiceProxyHealthy = count, healthy
	w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(count))
	text, _ := json.MarshalIndent(body, "", "\t") // cannot fail
	answer(w, code(count > 0 && healthy && leaving == ""), text)
}

// nodeAnswer is the body of /healthz and /livez, in the form of kube-proxy.
type nodeAnswer struct {
	LastUpdated  time.Time                  `json:"lastUpdated"`
	CurrentTime  time.Time                  `json:"currentTime"`
	NodeEligible *bool                      `json:"nodeEligible,omitempty"`
	Healthy      bool                       `json:"healthy"`
	Status       map[lb.Family]familyAnswer `json:"status"`
	// Reason is why the node is not eligible.
	Reason lb.Reason `json:"reason,omitempty"`
}

type familyAnswer struct {
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

func (a *Actor) nodeHandler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { a.answerNode(w, true) })
	mux.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) { a.answerNode(w, false) })
	return mux
}

// answerNode answers for the node as a whole. Whether the node stays matters to those who send it
// traffic, not to those who would restart us.
func (a *Actor) answerNode(w http.ResponseWriter, eligibility bool) {
	now := a.deps.Now()
	a.mu.Lock()
	body := nodeAnswer{LastUpdated: now, CurrentTime: now, Healthy: a.healthy(now), Status: map[lb.Family]familyAnswer{}}
	for family, oldest := range a.node.Unapplied {
		status := familyAnswer{LastUpdated: now, Healthy: !a.stale(family, now)}
		if !status.Healthy {
			status.LastUpdated = oldest
			if oldest.Before(body.LastUpdated) {
				body.LastUpdated = oldest
			}
		}
		body.Status[family] = status
	}
	eligible := a.node.Known && a.node.Leaving == ""
	body.Reason = a.node.Leaving
	a.mu.Unlock()
	path, ok := "/livez", body.Healthy
	if eligibility {
		path, ok = "/healthz", body.Healthy && eligible
		body.NodeEligible = &eligible
	} else {
		body.Reason = ""
	}
	if a.deps.Answered != nil {
		a.deps.Answered(path, code(ok))
	}
	text, _ := json.Marshal(body) // cannot fail
	answer(w, code(ok), text)
}

func code(ok bool) int {
	if ok {
		return http.StatusOK
	}
	return http.StatusServiceUnavailable
}

func answer(w http.ResponseWriter, code int, body []byte) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_, _ = w.Write(body) // the client has gone
}
